"""Which checkpoints are kept: the newest that verify, and the best. Ordered by step, because clocks jump."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from finetune.run.files import SUPERSEDED
from finetune.training.checkpoints.final import best_in
from finetune.training.checkpoints.manifest import MANIFEST, checkpoints_in, files_of, problems
from finetune.training.checkpoints.writing import delete, flush, point_to

Marks = dict[str, tuple[int, int]]  # each file's size, and modification time in nanoseconds


class Keeper:
    """Rotates the checkpoints of one run folder, on rank 0. Reading all kept checkpoints at each save would cost more
    than the save, so a verified checkpoint is not read again while its files keep their sizes and modification times. A
    disk error on an older checkpoint only warns: it does not end a run whose save has succeeded."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.trusted: dict[Path, Marks] = {}

    def trust(self, checkpoint: Path) -> None:
        """Record a checkpoint that has just been written or has verified."""
        try:
            self.trusted[checkpoint.resolve()] = _marks(checkpoint)
        except OSError as error:
            _warn(checkpoint, error)

    def go_on_from(self, checkpoint: Path, step: int) -> None:
        """A resumed run begins after `step`, and all ranks have read its checkpoint. Later checkpoints are from an
        abandoned branch of the run: they are renamed, or the next `--resume auto` would continue from them."""
        if (checkpoint / MANIFEST).is_file():
            self.trust(checkpoint)
        there = checkpoints_in(self.run_folder)
        aside = [path.name for path in there if int(path.name.rpartition("-")[2]) > step and _set_aside(path)]
        if not aside:
            return
        if checkpoint.resolve().parent == self.run_folder.resolve():
            point_to(self.run_folder / checkpoint.name)
        flush(self.run_folder)
        print(
            f"note: checkpoints later than step {step} are now named {SUPERSEDED}...: {', '.join(aside)}. No run "
            "resumes from them or deletes them.",
            flush=True,
        )

    def rotate(self, limit: int | None, current: Path, best: str | None) -> None:
        """Delete the checkpoints older than the newest `limit` that verify, but never `current` or `best`."""
        if limit is None or limit < 1:
            self.trusted.clear()  # nobody asks for it, and it would grow with each save
            return
        spared = {current.name, named.name if (named := best_in(self.run_folder, best)) else ""}
        there, whole = checkpoints_in(self.run_folder), 0
        for i, checkpoint in enumerate(there):
            if not any(whole + j >= limit and other.name not in spared for j, other in enumerate(there[i:])):
                return  # nothing to delete, so nothing to verify
            try:
                if whole >= limit and checkpoint.name not in spared:
                    self.trusted.pop(checkpoint.resolve(), None)
                    delete(checkpoint)
                elif whole < limit and self._verifies(checkpoint):
                    whole += 1
            except OSError as error:
                _warn(checkpoint, error)

    def _verifies(self, checkpoint: Path) -> bool:
        known = self.trusted.get(checkpoint.resolve())
        if known is not None and known == _marks(checkpoint):
            return True
        if problems(checkpoint, hashes=True):
            return False
        self.trust(checkpoint)
        return True


def _set_aside(checkpoint: Path) -> bool:
    aside = checkpoint.with_name(SUPERSEDED + checkpoint.name)
    try:
        shutil.rmtree(aside, ignore_errors=True)  # from an earlier resume
        os.replace(checkpoint, aside)
    except OSError as error:
        _warn(checkpoint, error)
        return False
    return True


def _warn(checkpoint: Path, error: OSError) -> None:
    print(f"warning: {checkpoint.name} stays as it is: {error.strerror or error}.", flush=True)


def _marks(checkpoint: Path) -> Marks:
    files, strange = files_of(checkpoint)
    stats = {name: (checkpoint / name).stat() for name in files}
    return {name: (its.st_size, its.st_mtime_ns) for name, its in stats.items()} | dict.fromkeys(strange, (-1, -1))
