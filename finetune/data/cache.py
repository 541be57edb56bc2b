"""Runs a long preparation once, on one rank, while the others wait for it with a timeout.

This is not a collective: a barrier dies after the process group's 10 to 30 minutes, with a message about gloo or NCCL.
Here the first rank to arrive takes a file lock and prepares; the rest poll for the finished folder. It works on one
node and on several, with or without a shared file system."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from finetune.errors import RequestError, RunError, disk_is_full
from finetune.run.launch import Launch

OF_NO_EFFECT = ("preprocessing_num_workers", "data_timeout_seconds")  # flags that do not affect the prepared data
POLL_SECONDS = 0.2
REPORT_SECONDS = 30.0


def cache_home() -> Path:
    """Where prepared data is kept: $FINETUNE_CACHE, or `finetune` in the user's cache folder."""
    if given := os.environ.get("FINETUNE_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "finetune"


def cache_key(*parts: Any) -> str:
    """A short name derived from `parts`, which are plain JSON values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


FileState = tuple[str, int, int, int]


def file_state(path: str | None) -> FileState | None:
    """Name, size in bytes, and times of the last content and inode change in nanoseconds; a change in these prepares
    the data again. Programs set the first time as they like (`cp -p`, `rsync -t`, `tar`, `touch`); only the kernel sets
    the second."""
    if path is None:
        return None
    place = Path(path).expanduser().resolve()
    try:
        state = place.stat()
    except OSError:
        return str(place), -1, -1, -1
    return str(place), state.st_size, state.st_mtime_ns, state.st_ctime_ns


def file_states(dataset_name: str | None, *files: str | None) -> list[FileState | None]:
    """The state of each data file, including the files of a data set in a local folder."""
    place = Path(dataset_name or "").expanduser()
    is_folder = dataset_name is not None and place.is_dir()
    local = sorted(str(file) for file in place.rglob("*") if file.is_file()) if is_folder else []
    return [file_state(file) for file in (*files, *local)]


def folder_for(kind: str, form: int, files: Sequence[Any], *settings: Any) -> Path:
    """The folder for prepared data of a `kind`, whose content has the `form`. Its name changes with the states of the
    data `files`, with Python, whose own text is built in, and with the `settings`: JSON values, and dataclasses of
    flags, of which those OF_NO_EFFECT do not count."""
    plain = [asdict(one) if is_dataclass(one) and not isinstance(one, type) else one for one in settings]
    for flags in plain:
        for name in OF_NO_EFFECT if isinstance(flags, dict) else ():
            flags.pop(name, None)
    return cache_home() / kind / cache_key(form, platform.python_version(), files, plain)


def prepare_once(
    folder: Path, prepare: Callable[[Path], None], *, what: str, launch: Launch, timeout_seconds: float
) -> bool:
    """Makes sure that `folder` exists and is complete. Returns True if this call made it.

    `prepare` fills a temporary folder, which is renamed when it returns, so a folder that exists is complete. Only the
    rank that leads a node may prepare; the others wait.
    Raises RunError after `timeout_seconds`, and RequestError if the cache is not writable.
    """
    with kept_in(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    waiting = _Waiting(what, folder, launch.tells_of_waiting, timeout_seconds)
    lock = FileLock(f"{folder}.lock", timeout=0)
    while not folder.is_dir():
        if launch.leads_its_node:
            with suppress(Timeout), kept_in(folder.parent):  # another node or run is preparing the same data
                lock.acquire()
        if lock.is_locked:
            try:
                if folder.is_dir():
                    return False
                _prepare_in(folder, prepare)
                return True
            finally:
                lock.release()
        waiting.a_little()
    return False


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Raises RequestError, naming the variable, if `folder` of the cache is not writable, and RunError if its disk is
    full."""
    try:
        yield
    except Timeout:
        raise
    except OSError as error:
        if disk_is_full(error):
            raise RunError(
                f"the disk of {folder} is full. Make room, or set FINETUNE_CACHE to a folder on a larger disk. What "
                "is already there can be reused."
            ) from error
        raise RequestError(
            f"FINETUNE_CACHE: no prepared data can be kept in {folder} ({error.strerror}). Set the variable to a "
            "writable folder."
        ) from error


def _prepare_in(folder: Path, prepare: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed run; we hold the lock
    unfinished.mkdir()
    try:
        prepare(unfinished)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not disk_is_full(error):
            raise
        homes = f"{folder.parent} ($FINETUNE_CACHE) or of the datasets library's cache ($HF_HOME)"
        raise RunError(
            f"the disk of {homes} is full, so the data could not be prepared. Make room, set these to a larger disk, "
            "or train with --streaming True."
        ) from error
    unfinished.rename(folder)


class _Waiting:
    def __init__(self, what: str, folder: Path, reports: bool, timeout_seconds: float) -> None:
        self.what, self.folder, self.reports, self.timeout = what, folder, reports, timeout_seconds
        self.start = self.reported = time.monotonic()

    def a_little(self) -> None:
        now = time.monotonic()
        waited = now - self.start
        if waited > self.timeout:
            raise RunError(
                f"waited {waited:.0f} s for another process {self.what}, and gave up. If it is still working, raise "
                f"--data_timeout_seconds (now {self.timeout:.0f}); if not, delete {self.folder}.lock."
            )
        if self.reports and now - self.reported > REPORT_SECONDS:
            self.reported = now
            size = 0
            with suppress(OSError):  # files come and go while the other process works
                size = sum(f.stat().st_size for f in Path(f"{self.folder}.unfinished").glob("**/*") if f.is_file())
            print(
                f"waiting for another process {self.what}: {waited:.0f} s, {size / 2**20:.0f} MiB written so far",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(POLL_SECONDS)
