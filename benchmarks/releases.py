"""What a measurement was made with: the package releases, and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}


def in_words(found: Mapping[str, str]) -> str:
    """As text, for the pages of docs/results/."""
    return ", ".join(f"{name} {number}" for name, number in found.items())


def this_machine() -> str:
    """The name of the GPU, or the kind and number of the cores, the widest vectors that torch uses, and whether they
    multiply bf16 natively."""
    import torch

    from finetune.training.runtime import choose_precision

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    bf16 = "native" if choose_precision(False) == "bf16" else "emulated"
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, bf16 {bf16}"
