"""A folder that all ranks write together, and that appears complete or not at all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from finetune.errors import RunError
from finetune.training.checkpoints.lock import keep_locked
from finetune.training.checkpoints.manifest import FileRecord, files_of, shares
from finetune.training.checkpoints.writing import (
    SHARED_DISK_SECONDS,
    About,
    by_first,
    commit,
    every,
    explained,
    folder_of,
    leads,
    outer_of,
    rank,
    ranks,
    record_on_disk,
    together,
)


class Handed(Protocol):
    """Writes and commits the folder while training continues (finetune.training.checkpoints.saves)."""

    def begin(self, place: Path) -> None:
        """Called before the ranks begin to write."""

    def later(self) -> set[str]:
        """The files, of all ranks, that it will write. All ranks call it."""

    def hand_over(self, sizes: dict[str, int]) -> None:
        """Describe the remaining work; `sizes` are those of this rank's share of the files already written."""

    def go(self) -> None:
        """Start it. Called once all ranks have described theirs: it would take the processor from a rank's messages."""


class AtomicFolder:
    """All ranks write one folder: after `with AtomicFolder(place, about) as folder` it is flushed to disk with its
    manifest, or does not exist. Without `about` it gets no manifest. With `beside` it appears later. `check` is what
    rank 0 does first; if it raises, nothing is made.

    Files are written to `unfinished-NAME/NAME`, so that libraries that choose the last path component can be used.
    """

    def __init__(
        self, place: Path, about: About | None, beside: Handed | None = None, check: Callable[[], object] | None = None
    ) -> None:
        self.place, self.about, self.beside, self.check = place, about, beside, check
        self.outer, self.folder = outer_of(place), folder_of(place)
        self.records: dict[str, FileRecord] = {}

    def __enter__(self) -> Path:
        with explained(self.place):
            by_first(self._make)
            together(self._see)
            if self.beside is not None:
                self.beside.begin(self.place)
        return self.folder

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        # On failure the unfinished folder keeps a name that nobody resumes from. The other ranks may be anywhere in
        # a library's collectives: the launcher ends them once this one has ended.
        with explained(self.place):
            if error is not None:
                raise error
            # Both are collective: rank 0 looks at the files after all ranks have written theirs.
            later = self.beside.later() if self.beside is not None else together(set[str])
            sizes = by_first(lambda: self._sizes(later))
            names = shares(sizes, ranks())[rank()]
            if self.beside is not None:
                beside = self.beside
                together(lambda: beside.hand_over({name: sizes[name] for name in names}))
                beside.go()
                return
            own = together(lambda: {name: record_on_disk(self.folder, name, sizes[name], rank()) for name in names})
            self.records = {name: record for part in every(own) for name, record in part.items()}
            together(self._commit)

    @property
    def bytes(self) -> int:
        """The folder's size; known once it is in place."""
        return sum(record.bytes for record in self.records.values())

    def _sizes(self, later: set[str]) -> dict[str, int]:
        return {name: size for name, size in files_of(self.folder)[0].items() if name not in later}

    def _make(self) -> None:
        if self.check is not None:
            self.check()
        keep_locked(self.place.parent)
        shutil.rmtree(self.outer, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def _see(self) -> None:
        end = time.monotonic() + SHARED_DISK_SECONDS
        while not self.folder.is_dir():
            if time.monotonic() > end:
                raise RunError(f"{self.folder}: rank 0 created it, but this rank does not see it. Use a shared folder.")
            time.sleep(0.1)

    def _commit(self) -> None:
        if leads():
            self.records = commit(self.place, self.about, self.records)
