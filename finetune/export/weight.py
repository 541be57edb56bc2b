"""A weight that has not been read yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weight:
    """`read` gives it, of `shape` and `dtype`, in memory of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    def bytes_in(self, dtype: torch.dtype) -> int:
        return math.prod(self.shape) * int(cast_of(self.dtype, dtype).itemsize)


def cast_of(stored: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """Numbers with a fraction are cast, others keep their kind."""
    return wanted if stored.is_floating_point else stored
