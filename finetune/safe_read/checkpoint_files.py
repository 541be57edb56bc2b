"""Checks the files of a checkpoint that a library would open as pickles."""

from __future__ import annotations

from pathlib import Path

from finetune.safe_read.pickles import guarded, load_checked
from finetune.safe_read.sharded import check_sharded

WRITTEN_ONLY = ("training_args.bin", "adapter_args.bin")  # written by the Trainer and never read back
PICKLED = (".pt", ".pth", ".bin", ".metadata")  # opened as pickles by libraries that resume, load or export


def refuse_unsafe(path: Path) -> None:
    """Check one file of a checkpoint before a library opens it. Raises RequestError if opening it could run code, or if
    it cannot be opened. `.distcp` files are checked with their `.metadata`."""
    if path.name in WRITTEN_ONLY or not path.name.endswith(PICKLED):
        return
    if path.name.endswith(".metadata"):
        guarded(path, lambda: check_sharded(path))
    else:
        load_checked(path)
