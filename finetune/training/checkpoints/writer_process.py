"""A rank's process that writes checkpoints while training continues: it writes what the rank has copied, and then does
the rest of a save: hashes, flushes, and on rank 0 the manifest and the rename.

The writers need no collectives: each leaves the records of its files beside the folder, and rank 0's writer waits for
all of them. A writer ends with its rank, however that dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.training.checkpoints.copies import Memory, restored, restored_weights
from finetune.training.checkpoints.hashed_file import Disk, HashedFile
from finetune.training.checkpoints.manifest import FileRecord, read_manifest, record_of
from finetune.training.checkpoints.rotation import Keeper, Marks
from finetune.training.checkpoints.writing import About, after_rename, commit, folder_of, outer_of, record_on_disk

PR_SET_PDEATHSIG = 1  # linux/prctl.h
NICENESS = 10  # training steps come first
POLL_SECONDS = 0.005

Mark = tuple[int, int]


@dataclass(frozen=True)
class Header:
    """The beginning of a weights file and the order of its tensors, from a file of the same form that safetensors
    wrote."""

    form: tuple[Any, ...]
    bytes: bytes
    names: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, form: tuple[Any, ...]) -> Header:
        """Source: github.com/huggingface/safetensors, README.md, Format."""
        with path.open("rb") as file:
            size = file.read(8)
            words = file.read(int.from_bytes(size, "little"))
        places = {name: place["data_offsets"] for name, place in json.loads(words).items() if name != "__metadata__"}
        return cls(form, size + words, tuple(sorted(places, key=lambda name: tuple(places[name]))))


class Target:
    """The disk, and the headers of the weights files written to it so far, by name."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.headers: dict[str, Header] = {}


@dataclass(frozen=True)
class Copy:
    """A file to be written, by its name in the checkpoint: with torch.save, as safetensors if it has `metadata`, or as
    it is."""

    name: str
    content: Any
    metadata: dict[str, str] | None = None
    is_zip: bool = True
    is_file: bool = False

    def write(self, folder: Path, memory: Memory, target: Target) -> Future[FileRecord]:
        """The record is there once the file is on disk."""
        path = folder / self.name
        if self.metadata is not None:
            return self._write_weights(path, memory, target)
        with HashedFile(path, target.disk) as file:
            if self.is_file:
                file.write(self.content)
            else:
                torch.save(restored(self.content, memory), file, _use_new_zipfile_serialization=self.is_zip)
            return file.closed()

    def _write_weights(self, path: Path, memory: Memory, target: Target) -> Future[FileRecord]:
        """safetensors writes the first file of a form, through the page cache."""
        form = (self.metadata, {name: about for name, (_, *about) in self.content.items()})
        header = target.headers.get(self.name)
        if header is None or header.form != form:
            save_file(restored_weights(self.content, memory), path, self.metadata)
            target.headers[self.name] = Header.of(path, form)
            return target.disk.flushes.submit(record_of, path, to_disk=True)
        with HashedFile(path, target.disk) as file:
            file.write(header.bytes)
            for place, size, *_ in map(self.content.__getitem__, header.names):
                file.write(memory.at(place, size).numpy())
            return file.closed()


@dataclass(frozen=True)
class Job:
    """One rank's part of a checkpoint. `sizes` are those of this rank's share of the files already written. Only rank 0
    has a `keeper`."""

    place: Path
    about: About
    rank: int
    ranks: int
    sizes: dict[str, int]
    copies: tuple[Copy, ...]
    keeper: Keeper | None = None
    limit: int | None = None
    best: str | None = None


@dataclass(frozen=True)
class Report:
    """A rank's part is on disk; or the checkpoint (`is_whole`) is in place, with its size; or an error occurred."""

    is_whole: bool = False
    bytes: int = 0
    trusted: dict[Path, Marks] = field(default_factory=dict)
    error: str | None = None
    errno: int | None = None


def reports(job: Job, memory: Memory, target: Target, connection: Connection) -> Iterator[Report]:
    """Do the job, and yield its reports."""
    folder, outer = folder_of(job.place), outer_of(job.place)
    written = {copy.name: copy.write(folder, memory, target) for copy in job.copies}
    own = {name: record.result() for name, record in written.items()}
    own |= {name: record_on_disk(folder, name, size, job.rank) for name, size in job.sizes.items()}
    _tell(outer, job.rank, own)
    yield Report()
    if job.keeper is None:
        return
    records = {name: record for rank in range(job.ranks) for name, record in _told(outer, rank, connection).items()}
    yield kept(job, commit(job.place, job.about, records))


def kept(job: Job, records: dict[str, FileRecord]) -> Report:
    """Rotate, now that the checkpoint is in place."""
    assert job.keeper is not None
    job.keeper.trust(job.place)
    job.keeper.rotate(job.limit, job.place, job.best)
    return Report(True, sum(record.bytes for record in records.values()), job.keeper.trusted)


def report_left_by(job: Job, mark: Mark | None) -> Report | None:
    """The report of a process that was killed after its work was done and before it told so; None if it was not done.
    `mark` tells the folder that was written. What the process had still to do in the run folder is done here."""
    has_told = told_by(outer_of(job.place), job.rank).is_file()  # asked first: it goes once the checkpoint is in place
    if mark is None or mark_of(job.place) != mark:
        return Report() if has_told and job.keeper is None else None
    if job.keeper is None:
        return Report()
    after_rename(job.place)
    return kept(job, read_manifest(job.place).files)


def mark_of(folder: Path) -> Mark | None:
    """Its device and inode, which it keeps when it is renamed; None if it is not there."""
    with suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino
    return None


def told_by(outer: Path, rank: int) -> Path:
    """The file in which a rank's process leaves its records."""
    return outer / f"rank-{rank}.json"


def _tell(outer: Path, rank: int, records: dict[str, FileRecord]) -> None:
    temporary = outer / f"rank-{rank}.unfinished"
    temporary.write_text(json.dumps({name: asdict(record) for name, record in records.items()}), encoding="utf-8")
    temporary.replace(told_by(outer, rank))


def _told(outer: Path, rank: int, connection: Connection) -> dict[str, FileRecord]:
    """Wait for the records of a rank's writer. If it fails, its rank reports it and this one closes the connection."""
    path = told_by(outer, rank)
    while not path.is_file():
        if connection.poll(POLL_SECONDS):
            sys.exit()
    return {name: FileRecord(**record) for name, record in json.loads(path.read_text(encoding="utf-8")).items()}


def main() -> None:
    """The process's entry point. Its arguments: the handles of the connection and the memory, and the rank's pid."""
    handle, memory, parent = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        return
    os.nice(NICENESS)
    torch.set_num_threads(1)
    connection, shared, target = Connection(handle), Memory(memory), Target()
    while True:
        try:
            place, size, segments = connection.recv()
        except EOFError:
            return
        shared.map(segments)
        job: Job = pickle.loads(shared.at(place, size).numpy().tobytes())
        try:
            for report in reports(job, shared, target, connection):
                connection.send(report)
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
            connection.send(Report(error=words[:400], errno=getattr(error, "errno", None)))
