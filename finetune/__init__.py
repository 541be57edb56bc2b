"""The library behind the recipes: code that at least two recipes share. Import the subpackages by name.

    from finetune import train, plan, check, load_run

These four are imported lazily (PEP 562); only `train` and a run's model import torch. `plan` is the subpackage, which
is itself callable."""

__version__ = "0.2.0"

import importlib
import logging
from typing import Any

# If installed, it is imported with transformers' Trainer, and on a CPU it warns on every rank about a kernel that only
# 4-bit inference uses (bitsandbytes 0.50, backends/cpu/ops.py).
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

_FROM_PYTHON = {"train": "finetune.api.training", "check": "finetune.api.checking", "load_run": "finetune.api.run"}


def __getattr__(name: str) -> Any:
    if name not in _FROM_PYTHON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FROM_PYTHON[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM_PYTHON, "plan"])
