"""A recipe as on a CPU on which torch draws masks slowly: `slow_draws.py RECIPE FLAGS`. It prints the rate of each mask
that is drawn in its place."""

from __future__ import annotations

import runpy
import sys

import torch

from finetune.models import dropout

drawn = dropout.mask_like


def mask_like(x: torch.Tensor, p: float) -> torch.Tensor:
    print(f"mask: {p}", flush=True)
    return drawn(x, p)


if __name__ == "__main__":
    dropout.draws_slowly = lambda: True  # type: ignore[assignment]
    dropout.mask_like = mask_like
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
