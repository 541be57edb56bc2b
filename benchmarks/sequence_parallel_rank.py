"""A rank of benchmarks/sequence_parallel.py: runs recipes/causal_lm.py and measures what its first forward pass keeps
for the backward pass: `python sequence_parallel_rank.py FILE FLAGS`."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from finetune.measure.memory import Allocations
from finetune.training.trainer import FinetuneTrainer

plain = FinetuneTrainer.compute_loss
counted: list[int] = []


def compute_loss(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if counted or not model.training:
        return plain(self, model, *args, **kwargs)
    with Allocations() as memory:
        loss = plain(self, model, *args, **kwargs)
    counted.append(memory.live)
    Path(f"{file}.{os.environ.get('RANK', 0)}").write_text(json.dumps(counted))
    return loss


if __name__ == "__main__":
    file, *flags = sys.argv[1:]
    FinetuneTrainer.compute_loss = compute_loss  # type: ignore[method-assign]
    sys.argv = ["recipes/causal_lm.py", *flags]
    runpy.run_path("recipes/causal_lm.py", run_name="__main__")
