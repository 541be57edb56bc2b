"""What stands against writing checkpoints while training continues."""

from __future__ import annotations

import os
import resource
from typing import Any

from transformers.integrations import get_reporting_integration_callbacks

from finetune.training.checkpoints.space import free_memory

MEMORY_SHARE = 0.5  # of a host's free memory: the most that the copies may take


def obstacle(args: Any, needed: int) -> str | None:
    """Why checkpoints of which a host copies `needed` bytes cannot be written while training continues, or None."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create to hold the copies (Linux has)"
    if args.save_on_each_node:
        return "with --save_on_each_node, several ranks write files of the same name"
    for kind in get_reporting_integration_callbacks(args.report_to):
        own = "on_save" in vars(kind)
        if own and (kind.__name__ != "WandbCallback" or os.environ.get("WANDB_LOG_MODEL") == "checkpoint"):
            return f"{kind.__name__} may upload each checkpoint as it is saved"
    return lacking(needed)


def lacking(needed: int, held: int = 0) -> str | None:
    """Why a host cannot hold copies of `needed` bytes, of which it holds so many already, or None."""
    if 0 <= (most := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) < needed:
        return (
            f"the copies take about {needed / 2**20:,.0f} MiB, and a file, as which they are counted, may have "
            f"{most / 2**20:,.0f} MiB (ulimit -f)"
        )
    if (more := needed - held) > MEMORY_SHARE * (free := free_memory()):
        return (
            f"the copies take about {more / 2**20:,.0f} MiB{' more' * (held > 0)} of this host's memory, of which "
            f"{free / 2**20:,.0f} MiB are free, and they may take at most half of that"
        )
    return None
