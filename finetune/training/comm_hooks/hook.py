"""The function that DDP calls. It has a module of its own because DDP compares its annotations with the classes
themselves (torch 2.13, distributed.py, _check_comm_hook), which the future import of annotations would make text."""

from typing import Any

import torch
from torch import distributed


def exchange_gradients(state: Any, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`state` is the run's Compression."""
    future: torch.futures.Future[torch.Tensor] = state.exchange(bucket)
    return future
