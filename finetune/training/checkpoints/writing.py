"""The building blocks of atomic folders: messages between ranks, flushes, the manifest and the rename."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import distributed

from finetune.errors import FinetuneError, RunError, first_line
from finetune.run.files import DELETING, IDENTITY, REPLACED, UNFINISHED
from finetune.training.checkpoints.identity import Identity
from finetune.training.checkpoints.lock import gone, is_missing
from finetune.training.checkpoints.manifest import (
    FileRecord,
    Layout,
    Manifest,
    record_of,
    write_flushed,
    write_manifest,
)
from finetune.versions import versions

LATEST = "latest"  # in a run folder, names the newest checkpoint for people and tools; --resume does not use it
SHARED_DISK_SECONDS = 5.0  # within which all ranks must see a folder that rank 0 has created
READERS_WORDS = ("inline_container", "PytorchStreamReader")  # in the RuntimeErrors of torch's reader
# In the disk errors of torch (caffe2/serialize/inline_container.cc), safetensors (serialize_file) and tokenizers (a
# bare Exception with the message of Rust's std::io::Error).
WRITERS_WORDS = ("inline_container", "PytorchStreamWriter", "basic_ios", "Parent directory", "I/O error", "(os error ")
RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100  # linux/fcntl.h

T = TypeVar("T")


class OtherRankError(RunError):
    """An error of a library or the system on another rank, or in this rank's writer process."""


@dataclass(frozen=True)
class About:
    """What a manifest records besides its files."""

    step: int
    epoch: float | None
    global_batch_size: int
    layout: Layout
    identity: Identity | None = None


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """Turn a disk's error about `place` into a RunError. A full disk is explained further out."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError | OtherRankError) and not any(word in str(error) for word in WRITERS_WORDS):
            raise
        if is_missing(place.parent, error):
            raise gone(place.parent) from error
        raise RunError(
            f"{place} could not be saved: {first_line(error)}. Earlier checkpoints are whole. Fix that, then "
            "--resume allow."
        ) from error


def record_on_disk(folder: Path, name: str, size: int, rank: int) -> FileRecord:
    """Flush a file and return its record as `rank` reads it. Raises RunError if rank 0 saw another size."""
    record = record_of(folder / name, to_disk=True)
    if record.bytes != size:
        raise RunError(
            f"{folder / name}: rank 0 sees {size:,} bytes, but rank {rank} reads {record.bytes:,}. Something "
            "else writes there, or the hosts do not see the same disk. Earlier checkpoints are whole; fix that, "
            "then --resume allow."
        )
    return record


def commit(place: Path, about: About | None, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
    """Give a folder whose files are on disk its manifest and its final name. Returns its files. One rank calls it."""
    folder = folder_of(place)
    if about is not None:
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if about.identity is not None:
            records = {**records, IDENTITY: write_identity(folder, about.identity.at(about.step, records))}
        files = dict(sorted(records.items()))
        found = (about.step, about.epoch, saved, about.global_batch_size, about.layout, versions(), files)
        write_manifest(folder, Manifest(*found))
    for base, _, _ in os.walk(folder, topdown=False):
        flush(Path(base))
    put_in_place(folder, place)
    after_rename(place, has_manifest=about is not None)
    return records


def after_rename(place: Path, has_manifest: bool = True) -> None:
    """What is left to do once a folder has its final name. It may be done twice."""
    flush(place.parent)
    shutil.rmtree(outer_of(place), ignore_errors=True)
    if has_manifest:
        point_to(place)


def write_identity(folder: Path, identity: Identity) -> FileRecord:
    """Write run.json into an unfinished checkpoint, and flush it to disk; `commit` flushes the folder."""
    write_flushed(folder / IDENTITY, json.dumps(identity.as_json(), indent=1) + "\n")
    return record_of(folder / IDENTITY)


def outer_of(place: Path) -> Path:
    """The outer folder in which `place` is assembled while it is being written."""
    return place.with_name(UNFINISHED + place.name)


def folder_of(place: Path) -> Path:
    """The folder inside `outer_of(place)` that will become `place`."""
    return outer_of(place) / place.name


def put_in_place(folder: Path, place: Path) -> None:
    """Rename. An existing `place` is swapped with `folder`, so that one of the two is always there."""
    if not place.exists():
        os.replace(folder, place)
    elif not _exchange(folder, place):  # the file system cannot swap; rename one after the other
        aside = place.with_name(REPLACED + place.name)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(place, aside)
        os.replace(folder, place)
        shutil.rmtree(aside, ignore_errors=True)


def restore_replaced(run_folder: Path) -> None:
    """Rename back what was moved aside for a replacement that never came. Only rank 0, with the run folder's lock."""
    for aside in run_folder.glob(f"{REPLACED}*"):
        place = aside.with_name(aside.name.removeprefix(REPLACED))
        if not place.exists():
            with suppress(OSError):  # a disk that cannot be written is reported elsewhere
                os.rename(aside, place)


def _exchange(one: Path, other: Path) -> bool:
    """renameat2(2), which Python lacks (as of 3.13); False if the kernel or the file system does not support it."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


def point_to(place: Path) -> None:
    """Make `latest` name the checkpoint."""
    write_durably(place.with_name(LATEST), f"{place.name}\n")


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically, and flush it to disk."""
    temporary = path.with_name(path.name + ".unfinished")
    write_flushed(temporary, text)
    temporary.replace(path)
    flush(path.parent)


def delete(folder: Path) -> None:
    """Delete a checkpoint. If the process is killed midway, the remains have another name."""
    aside = folder.with_name(DELETING + folder.name)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def clear_leftovers(run_folder: Path) -> None:
    """Delete what an interrupted run left half written or half deleted. Only rank 0, with the run folder's lock."""
    restore_replaced(run_folder)
    for path in (path for name in (UNFINISHED, DELETING, REPLACED) for path in run_folder.glob(f"{name}*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a folder to disk, so that a folder with its final name is complete even after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot flush folders
            raise
    finally:
        os.close(handle)


def together(do: Callable[[], T]) -> T:
    """Each rank does its part. If some fail, each of those raises its own error, and the others raise the first one."""
    result: list[T] = []
    gathered(lambda: result.append(do()))
    return result[0]


def gathered(do: Callable[[], T]) -> list[T]:
    """Like `together`, with the results of all ranks."""
    result, error = None, None
    try:
        result = do()
    except Exception as met:
        error = met
    told = every((result, _in_words(error)))
    if error is not None:
        raise error
    if met_by := [said for _, said in told if said is not None]:
        kind, words = met_by[0]
        raise kind(words)
    return [one for one, _ in told]  # type: ignore[misc]


def by_first(do: Callable[[], T]) -> T:
    """Rank 0 does it, and all ranks have its result or its error."""
    result, error = None, None
    if leads():
        try:
            result = do()
        except Exception as met:
            error = met
    result, said = of_first((result, _in_words(error)))
    if error is not None:
        raise error
    if said is not None:
        kind, words = said
        raise kind(words)
    return result  # type: ignore[return-value]


def read_together(folder: Path, read: Callable[[], T]) -> T:
    """Like `together`, for reading a checkpoint: a file that one rank cannot read is a RunError on all."""

    def attempt() -> T:
        try:
            return read()
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(word in str(error) for word in READERS_WORDS):
                raise
            raise RunError(
                f"rank {rank()} could not read {folder}: {first_line(error)}. Its content was verified before, so look "
                "for a disk or network fault, then resume from it again."
            ) from error

    return together(attempt)


def _in_words(error: Exception | None) -> tuple[type[FinetuneError], str] | None:
    """The error that the other ranks raise: its class and message."""
    if isinstance(error, FinetuneError):
        return type(error), str(error)
    return None if error is None else (OtherRankError, f"rank {rank()}: {first_line(error)}")


def every(own: T) -> list[T]:
    """Every rank's value, on all ranks."""
    found: list[Any] = [own] * ranks()
    if ranks() > 1:
        distributed.all_gather_object(found, own)
    return found


def of_first(own: T) -> T:
    """Rank 0's value, on all ranks."""
    told = [own]
    if ranks() > 1:
        distributed.broadcast_object_list(told, src=0)
    return told[0]


def rank() -> int:
    return int(distributed.get_rank()) if distributed.is_initialized() else 0


def ranks() -> int:
    return int(distributed.get_world_size()) if distributed.is_initialized() else 1


def leads() -> bool:
    return rank() == 0
