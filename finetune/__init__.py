"""The library behind the recipes: only what two recipes share. Import the sub-packages by name.

    from finetune import train, plan, check, load_run

These four are imported when they are asked for (PEP 562), torch by `train` and by a run's model alone; `plan` is the
sub-package, which can be called."""

__version__ = "0.2.0"

import importlib
import logging
import os
from typing import Any

# Where it is installed, every import of transformers' Trainer brings it in, and on a CPU it warns on every rank of a
# kernel that only 4-bit inference has (bitsandbytes 0.50, backends/cpu/ops.py).
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# torch asks for huge pages for CPU tensors of 2 MiB and more where this is set when the first tensor is made (c10,
# impl/alloc_cpu.cpp), which importing transformers' Trainer does. Large tensors that live for a step, such as ZeRO's
# buckets and a language model's logits, are else faulted in by 4 KiB each time (docs/results/zero_speed.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_FROM_PYTHON = {"train": "finetune.api.training", "check": "finetune.api.checking", "load_run": "finetune.api.run"}


def __getattr__(name: str) -> Any:
    if name not in _FROM_PYTHON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FROM_PYTHON[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM_PYTHON, "plan"])
