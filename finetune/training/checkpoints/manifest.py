"""A checkpoint's manifest: every file's size and hash, and the run that wrote it. Never imports torch.

`manifest.json` is written last, into a folder that still has its unfinished name. A folder that matches its manifest is
as its run left it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from finetune.errors import RequestError
from finetune.safe_read import read_json_object
from finetune.safe_read.files import DEEPEST_FOLDER, is_hollow

MANIFEST = "manifest.json"
FORMAT = 1
OWN_HASH = "own_xxh3_128"  # hash of the rest of the manifest, in canonical form
CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")
NAMED_AT_MOST = 3  # problems that a message lists
BLOCK_BYTES = 4 * 2**20
READ_AND_WRITE = 0o666
ENGINES = ("ddp", "deepspeed", "fsdp", "pipeline")


@dataclass(frozen=True)
class FileRecord:
    """One file: its size, and its hash in 32 hexadecimal digits."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Layout:
    """How a run is distributed: `engine` is one of ENGINES; a single process without DeepSpeed is "ddp" with world size
    1."""

    engine: str
    world_size: int
    zero_stage: int | None = None
    stages: int | None = None
    pipelines: int | None = None

    def __str__(self) -> str:
        if self.engine == "pipeline":
            return f"{self.stages} stage(s) x {self.pipelines} pipeline(s)"
        return self.engine if self.zero_stage is None else f"{self.engine} ZeRO-{self.zero_stage}"


@dataclass(frozen=True)
class Manifest:
    """`saved` is UTC in ISO 8601; the keys of `files` are paths relative to the folder, with "/"."""

    step: int
    epoch: float | None
    saved: str
    global_batch_size: int
    layout: Layout
    versions: dict[str, str]
    files: dict[str, FileRecord]

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


def checkpoints_in(run_folder: Path) -> list[Path]:
    """The folders with checkpoint names, newest step first, whatever they contain. Links are left out: they lead to
    folders that may belong to others, and that nothing may delete."""
    found = [(int(m[1]), path) for path in run_folder.glob("checkpoint-*") if (m := CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir() and not path.is_symlink()]


def problems(folder: Path, hashes: bool) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; empty if it verifies. Without `hashes`, checks only names and
    sizes."""
    try:
        manifest = read_manifest(folder)
    except RequestError as error:
        return [str(error)]
    return misfits(folder, manifest) or (altered(folder, manifest, manifest.files) if hashes else [])


def in_short(found: list[str]) -> str:
    """The first few of the problems found, for a message."""
    more = len(found) - NAMED_AT_MOST
    return " ".join(found[:NAMED_AT_MOST]) + (f" And {more} more." if more > 0 else "")


def misfits(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing, unexpected, of the wrong size, or not regular files."""
    named = CHECKPOINT.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        return [f"{folder.name}: {MANIFEST} is for step {manifest.step}."]
    try:
        there, strange = files_of(folder)
    except OSError as error:
        return [f"{folder.name} cannot be read: {error.strerror}."]
    there.pop(MANIFEST, None)
    at, known = f"{folder.name}/", {*there, *strange}
    found = [f"{at}{_shown(name)} is a link or not a regular file, and is not opened." for name in strange]
    found += [f"{at}{_shown(name)} is missing." for name in manifest.files if name not in known]
    found += [f"{at}{_shown(name)} is not in {MANIFEST}." for name in there if name not in manifest.files]
    for name, record in manifest.files.items():
        if name in there and there[name] != record.bytes:
            found.append(f"{at}{_shown(name)} has {there[name]:,} bytes, and {MANIFEST} says {record.bytes:,}.")
    return found


def altered(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """A sentence for each of the files `names` whose hash differs. They must have passed `misfits`."""
    found = []
    for name in names:
        try:
            same = hash_of(folder / name) == manifest.files[name].xxh3_128
        except OSError as error:
            found.append(f"{folder.name}/{_shown(name)} cannot be read: {error.strerror}.")
            continue
        if not same:
            found.append(f"{folder.name}/{_shown(name)} has changed since it was saved.")
    return found


def _shown(name: str) -> str:
    """The name, safe to print: an untrusted name may contain terminal control sequences."""
    return name if name.isprintable() else ascii(name)


def files_of(folder: Path) -> tuple[dict[str, int], list[str]]:
    """The sizes of the regular files below a folder, and the names of everything else, including folders nested deeper
    than any of ours. Links are not followed."""
    files: dict[str, int] = {}
    strange: list[str] = []

    def fail(error: OSError) -> None:
        raise error

    for base, folders, names in os.walk(folder, onerror=fail):
        if len(Path(base).relative_to(folder).parts) == DEEPEST_FOLDER:
            strange += [Path(base, name).relative_to(folder).as_posix() for name in folders]
            folders.clear()  # do not descend into them
        for name in (*names, *folders):
            path = Path(base, name)
            mode = path.lstat()
            relative = path.relative_to(folder).as_posix()
            if stat.S_ISREG(mode.st_mode):
                files[relative] = mode.st_size
            elif not stat.S_ISDIR(mode.st_mode):
                strange.append(relative)
    return files, strange


def hash_of(path: Path) -> str:
    """A file's xxh3-128 in hexadecimal digits."""
    return record_of(path).xxh3_128


def record_of(path: Path, to_disk: bool = False) -> FileRecord:
    """Size and hash of the bytes that are read, whatever stat reports. With `to_disk`, the file is also flushed, and is
    as readable as its folder: safetensors 0.8 makes files that only their owner can read."""
    digest, size = xxhash.xxh3_128(), 0
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, "rb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        if is_hollow(handle):
            raise OSError(errno.EFBIG, "nearly all of it is a hole (sparse file)")
        if to_disk:
            with suppress(OSError):  # some file systems have no modes
                os.fchmod(handle, path.parent.stat().st_mode & READ_AND_WRITE)
        flushed = pool.submit(os.fsync, handle) if to_disk else None  # the disk writes while the hash is computed
        block = memoryview(bytearray(BLOCK_BYTES))
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
        if flushed is not None:
            flushed.result()
    return FileRecord(size, digest.hexdigest())


def shares(sizes: dict[str, int], count: int) -> list[list[str]]:
    """The names in `count` lists of about equal bytes; every rank computes the same lists."""
    lists: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = min(range(count), key=lambda i: loads[i])
        lists[lightest].append(name)
        loads[lightest] += sizes[name] + 1  # even an empty file has a cost
    return lists


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into an unfinished folder, and flush it to disk."""
    content = {"format": FORMAT, **asdict(manifest)}
    content[OWN_HASH] = _own_hash(content)
    write_flushed(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def write_flushed(path: Path, text: str) -> None:
    """Write a file, and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Raises RequestError, with a one-sentence message, for anything but a manifest that this toolkit wrote."""
    place = f"{folder.name}/{MANIFEST}"
    content = read_json_object(folder / MANIFEST, inside=folder, name=place)
    if content.get("format") != FORMAT:
        raise RequestError(f"{place} has format {str(content.get('format'))[:20]!r}, but this version reads {FORMAT}.")
    try:
        manifest = _parsed(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{place} is malformed: {str(error)[:100] or type(error).__name__}.") from error
    for name in manifest.files:
        if not _is_inside(name):
            raise RequestError(f"{place} names {name[:100]!r}, which is not a file inside the checkpoint.")
    if content.get(OWN_HASH) != _own_hash(content):
        raise RequestError(f"{place} has changed since it was saved.")
    return manifest


def _own_hash(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != OWN_HASH}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _parsed(content: dict[str, Any]) -> Manifest:
    """Raises KeyError, TypeError or ValueError if a field is missing or has the wrong type."""
    layout = content["layout"]
    engine = layout["engine"]
    if engine not in ENGINES:
        raise ValueError(f"{str(engine)[:20]!r} is not an engine")
    sizes = ("zero_stage", "stages", "pipelines")
    optional = {name: layout[name] if layout[name] is None else _count(layout, name) for name in sizes}
    epoch = content["epoch"]
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int | float)):
        raise TypeError("epoch is not a number")
    files = {}
    for name, record in content["files"].items():
        if not re.fullmatch("[0-9a-f]{32}", record["xxh3_128"]):
            raise ValueError(f"{name[:60]!r} has no hash")
        files[name] = FileRecord(_count(record, "bytes"), record["xxh3_128"])
    return Manifest(
        step=_count(content, "step"),
        epoch=epoch,
        saved=_text(content, "saved"),
        global_batch_size=_count(content, "global_batch_size"),
        layout=Layout(engine, _count(layout, "world_size"), **optional),
        versions={_text({"": name}, ""): _text(content["versions"], name) for name in content["versions"]},
        files=files,
    )


def _count(content: dict[str, Any], name: str) -> int:
    value = content[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {str(value)[:20]!r}")
    return value


def _text(content: dict[str, Any], name: str) -> str:
    value = content[name]
    if not isinstance(value, str) or len(value) > 100:
        raise ValueError(f"{name} is not a short string")
    return value


def _is_inside(name: str) -> bool:
    """Whether the name is a normalized relative path inside the folder. `misfits` finds links along it."""
    path = PurePosixPath(name)
    plain = name == path.as_posix() and not path.is_absolute() and ".." not in path.parts
    return plain and name not in ("", ".", MANIFEST) and "\0" not in name and "\\" not in name
