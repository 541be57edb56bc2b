"""The final model of a run folder, which `from_pretrained` opens: the old one, or none, or the new one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from finetune.training.checkpoints.manifest import FileRecord
from finetune.training.checkpoints.writing import AtomicFolder, flush, leads, together

FINAL = "final"  # where it is put together


def save_final(run_folder: Path, write: Callable[[Path], None]) -> dict[str, FileRecord]:
    """The model that `write` saves, into the run folder in place of one that is there. Returns what its files are, for
    `open_final`. All ranks must call it.

    At every moment `from_pretrained` finds the old model, or none, or the new: the old weights go before anything of
    the new model comes, and what it looks for first, the index or the one file, comes last. Until then `final/` is
    whole.
    """
    with (whole := AtomicFolder(run_folder / FINAL, None)) as folder:
        write(folder)
    together(lambda: _move_up(run_folder / FINAL) if leads() else None)
    return whole.records


def _move_up(folder: Path) -> None:
    run_folder = folder.parent
    for old in _weights(run_folder):
        old.unlink()
    flush(run_folder)
    last = ("model.safetensors", "adapter_model.safetensors")
    for path in sorted(folder.iterdir(), key=lambda path: (path.name.endswith(".index.json"), path.name in last)):
        target = run_folder / path.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)  # of one that was saved before
        os.replace(path, target)
    flush(run_folder)
    folder.rmdir()


def _weights(folder: Path) -> list[Path]:
    """What `from_pretrained` would open, the index first."""
    kinds = ("*.safetensors.index.json", "pytorch_model*.index.json", "model*.safetensors", "adapter_model.safetensors")
    return [path for kind in (*kinds, "pytorch_model*.bin", "adapter_model.bin") for path in sorted(folder.glob(kind))]
