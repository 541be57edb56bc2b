"""Whether a file of a checkpoint may be opened by a library that opens it as a pickle."""

from __future__ import annotations

from pathlib import Path

from finetune.safe_read.pickles import guarded, load_checked
from finetune.safe_read.sharded import check_sharded

WRITTEN_ONLY = ("training_args.bin", "adapter_args.bin")  # the Trainer writes it and nobody opens it
PICKLED = (".pt", ".pth", ".bin", ".metadata")  # what a library that resumes, loads or exports opens as a pickle


def refuse_unsafe(path: Path) -> None:
    """Look at one file of a checkpoint before a library opens it. Raises RequestError where opening it could run code,
    or where it cannot be opened. `.distcp` files are looked at with their `.metadata`."""
    if path.name in WRITTEN_ONLY or not path.name.endswith(PICKLED):
        return
    if path.name.endswith(".metadata"):
        guarded(path, lambda: check_sharded(path))
    else:
        load_checked(path)
