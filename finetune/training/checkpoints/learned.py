"""Learns how transformers writes a model's weights from a file that it wrote: which tensors, under which names, with
which metadata. Another process can then write the next file of the same model, byte for byte the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Form:
    """The form of one weights file."""

    file: str
    names: tuple[str, ...]
    metadata: dict[str, str]


class Learned:
    """Empty until a model is written to a single file whose tensors equal those of the state dict bit by bit."""

    def __init__(self) -> None:
        self.shapes: Shapes = {}
        self.form: Form | None = None

    def of(self, weights: dict[str, torch.Tensor]) -> Form | None:
        """The form, or None if the shapes are not those that `look` saw."""
        return self.form if _shapes(weights) == self.shapes else None

    def look(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self.shapes, self.form = _shapes(weights), None
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:  # sharded, or none
            return
        with safe_open(files[0], framework="pt") as file:
            names = tuple(file.keys())
            for name in names:
                if name not in weights or not _are_same(file.get_tensor(name), weights[name]):
                    return  # an adapter (its names are changed), or a model whose weights are converted
            self.form = Form(files[0].name, names, dict(file.metadata() or {}))


def _shapes(weights: dict[str, torch.Tensor]) -> Shapes:
    return {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bits, so NaN equals NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = [part.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for part in (one, other)]
    return bool(torch.equal(*flat))
