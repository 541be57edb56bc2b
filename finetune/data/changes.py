"""Detects data files that change while a run reads them, before a reader gets garbage, too few rows, or a bus error."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import xxhash

from finetune.data.cache import cache_home
from finetune.data.files import readable
from finetune.errors import RunError

MAPS = Path("/proc/self/maps")
TABLE = ".arrow"  # written by the datasets library to its own cache
LOOKED_AT_ROWS = 16
SAMPLES, SAMPLE_BYTES = 8, 4096  # of a file's content, to distinguish a `touch` from a write
ASK_AGAIN_SECONDS = (0.2, 1.0, 3.0)  # network file systems fail temporarily
LOOKS_SHARE = 0.01  # largest share of the time spent on checks
T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """A file's state when the run began to read it. `sample` is a digest of parts of its content."""

    device: int
    inode: int
    bytes: int
    changed: int  # nanoseconds, by the file system's clock
    sample: str


class UnchangedFiles:
    """Records files as they are now for a later `check`, which takes a microsecond per file. For `mapped` files only
    writes into the content matter: the run keeps it even if the name is deleted or reused."""

    def __init__(self, paths: Iterable[str | Path | None], mapped: bool = False) -> None:
        self.mapped, self.next_look = mapped, 0.0
        named = [str(Path(path).expanduser()) for path in paths if path is not None]
        states = {path: _state(path) for path in named}
        self.states = {path: state for path, state in states.items() if state is not None}

    def look(self) -> None:
        """Calls `check`, but rarely enough to cost nothing noticeable."""
        began = time.monotonic()
        if began < self.next_look:
            return
        self.check()
        ended = time.monotonic()
        self.next_look = ended + (ended - began) / LOOKS_SHARE

    def check(self) -> None:
        """Raises RunError for the first file that has changed."""
        for path, before in self.states.items():
            found = _asked(path, () if self.mapped else ASK_AGAIN_SECONDS)
            is_same = found is not None and (found.st_dev, found.st_ino) == (before.device, before.inode)
            if found is None or not is_same:
                if self.mapped:
                    continue
                raise _changed(path, before, f"is now another file of {found.st_size:,} bytes" if found else "is gone")
            if found.st_size < before.bytes or not (self.mapped or found.st_size == before.bytes):
                raise _changed(path, before, f"now has {found.st_size:,} bytes")
            if found.st_mtime_ns == before.changed or found.st_size > before.bytes:
                continue
            now = _state(path)
            if now is not None and now.inode == before.inode and now.sample != before.sample:
                raise _changed(path, before, "now has different content")
            self.states = {**self.states, path: replace(before, changed=found.st_mtime_ns)}  # touched


def _changed(path: str, before: State, what: str) -> RunError:
    return RunError(
        f"{path} has changed since the run began to read it: it had {before.bytes:,} bytes, and {what}. Restore "
        "the file (if it is prepared data, delete its folder to prepare it again), then start again with --resume "
        "allow."
    )


def _asked(path: str, again_after: tuple[float, ...]) -> os.stat_result | None:
    """`os.stat` with retries; None if the file does not exist or the file system does not answer."""
    for wait in (*again_after, 0.0):
        try:
            return os.stat(path)
        except OSError:
            time.sleep(wait)
    return None


def _state(path: str) -> State | None:
    """None if it is not a file, or cannot be read."""
    try:
        found = os.stat(path)
        return State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, _sample(path, found.st_size))
    except OSError:
        return None


def _sample(path: str, size: int) -> str:
    """A digest of samples spread over the first `size` bytes. Read, not mapped, so that truncation is no bus error."""
    taken = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            taken.update(file.read(min(SAMPLE_BYTES, size)))
    return taken.hexdigest()


def unchanged_rows(rows: Iterable[T], files: UnchangedFiles) -> Iterator[T]:
    """Yields `rows` of `files`. If a file has changed, that is the error raised, not what the reader makes of it."""
    try:
        for number, row in enumerate(readable(rows, RunError)):
            if number % LOOKED_AT_ROWS == 0:
                files.look()
            yield row
    except Exception:
        files.check()
        raise
    files.check()


def mapped_files() -> UnchangedFiles:
    """The prepared tables, texts and pictures that this process has memory-mapped. Reading beyond the end of a
    truncated one kills the process silently (SIGBUS). Empty without /proc. Files that the system maps (locales, user
    name caches) are not data and may change."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return UnchangedFiles(())
    fields = [line.split(maxsplit=5) for line in lines]
    shared = {found[5] for found in fields if len(found) == 6 and found[1].endswith("s")}
    cache = cache_home().resolve()
    return UnchangedFiles(
        sorted(name for name in shared if name.endswith(TABLE) or Path(name).is_relative_to(cache)), mapped=True
    )
