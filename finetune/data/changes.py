"""Data files that change while a run reads them: named, where the reader would find nonsense, less, or a bus error."""

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
TABLE = ".arrow"  # of the datasets library, which has a cache of its own
LOOKED_AT_ROWS = 16
SAMPLES, SAMPLE_BYTES = 8, 4096  # of a file's content, by which a `touch` is told from a write
ASK_AGAIN_SECONDS = (0.2, 1.0, 3.0)  # a network's file system fails to answer now and then
LOOKS_SHARE = 0.01  # of the time may go into looking
T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """What a file was when the run began to read it. `sample` stands for its content."""

    device: int
    inode: int
    bytes: int
    changed: int  # nanoseconds, by the file system's clock
    sample: str


class UnchangedFiles:
    """Files as they are now; `check` is for later, and takes a microsecond a file. Of `mapped` files the run has the
    content as long as nobody writes into it: what else has the name meanwhile, or that none has it, is no matter."""

    def __init__(self, paths: Iterable[str | Path | None], mapped: bool = False) -> None:
        self.mapped, self.next_look = mapped, 0.0
        named = [str(Path(path).expanduser()) for path in paths if path is not None]
        states = {path: _state(path) for path in named}
        self.states = {path: state for path, state in states.items() if state is not None}

    def look(self) -> None:
        """As `check`, but not so often that it costs anything."""
        began = time.monotonic()
        if began < self.next_look:
            return
        self.check()
        ended = time.monotonic()
        self.next_look = ended + (ended - began) / LOOKS_SHARE

    def check(self) -> None:
        """Raises RunError that names the first file which is another now."""
        for path, before in self.states.items():
            found = _asked(path, () if self.mapped else ASK_AGAIN_SECONDS)
            is_same = found is not None and (found.st_dev, found.st_ino) == (before.device, before.inode)
            if found is None or not is_same:
                if self.mapped:
                    continue
                raise _changed(path, before, f"is another of {found.st_size:,} bytes now" if found else "is gone")
            if found.st_size < before.bytes or not (self.mapped or found.st_size == before.bytes):
                raise _changed(path, before, f"has {found.st_size:,} bytes now")
            if found.st_mtime_ns == before.changed or found.st_size > before.bytes:
                continue
            now = _state(path)
            if now is not None and now.inode == before.inode and now.sample != before.sample:
                raise _changed(path, before, "has other content now")
            self.states = {**self.states, path: replace(before, changed=found.st_mtime_ns)}  # touched


def _changed(path: str, before: State, what: str) -> RunError:
    return RunError(
        f"{path} has changed since the run began to read it: it had {before.bytes:,} bytes, and {what}. Put the file "
        "back as it was (prepared data: delete its folder, and it is made anew), then --resume auto."
    )


def _asked(path: str, again_after: tuple[float, ...]) -> os.stat_result | None:
    """None where there is no such file, or no file system that tells."""
    for wait in (*again_after, 0.0):
        try:
            return os.stat(path)
        except OSError:
            time.sleep(wait)
    return None


def _state(path: str) -> State | None:
    """None for what is no file, or cannot be read."""
    try:
        found = os.stat(path)
        return State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, _sample(path, found.st_size))
    except OSError:
        return None


def _sample(path: str, size: int) -> str:
    """Of the first `size` bytes, from its beginning to its end; read, not mapped, so that less is no bus error."""
    taken = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            taken.update(file.read(min(SAMPLE_BYTES, size)))
    return taken.hexdigest()


def unchanged_rows(rows: Iterable[T], files: UnchangedFiles) -> Iterator[T]:
    """`rows` of `files`, as long as these are what they were; what a reader says of a file that is not, is not told."""
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
    """The data that this process has mapped into its memory: prepared tables, texts and pictures. To read where one
    has been cut off is deadly (SIGBUS), without a word. Empty where there is no /proc. What the system maps (locales,
    caches of user names) is no data, and changes as it likes."""
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
