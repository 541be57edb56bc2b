"""How to open a file that this process did not write: only a regular file, inside its folder, of bounded size."""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from finetune.errors import RequestError, first_line

MOST_BYTES = 64 * 2**20
SPARSE_FROM = 2**30  # bytes: smaller files may be stored in the inode, or be zeros that the file system compresses
SPARSE_RATIO = 64
DEEPEST_FOLDER = 50  # levels below the folder being read; checkpoints have 3
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
HUB_LINKS = ("snapshots", "blobs")  # the hub's cache: models--a--b/snapshots/REVISION/config.json -> ../../blobs/...


def open_plain(path: Path, inside: Path | None = None, name: str | None = None) -> BinaryIO:
    """Open a file to read. Links are followed, but with `inside` not out of that folder. Raises RequestError, beginning
    with `name` or the path, unless it is a regular file: a pipe waits for its writer, and a device never ends."""
    said = name or path
    if inside is not None:
        refuse_outside(path, inside)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
        file = open(handle, "rb")  # noqa: SIM115  (the caller closes it)
    except FileNotFoundError as error:
        raise RequestError(f"{said}: cannot be read (there is no such file).") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RequestError(f"{said}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if (is_plain := stat.S_ISREG(os.fstat(handle).st_mode)) and not is_hollow(handle):
        return file
    file.close()
    raise RequestError(
        f"{said}: {'is a sparse file without data' if is_plain else 'is not a regular file'}, and is not read."
    )


def is_hollow(handle: int) -> bool:
    """Whether a file claims to be huge, and the disk stores next to nothing of it."""
    state = os.fstat(handle)
    if state.st_size < SPARSE_FROM or getattr(state, "st_blocks", state.st_size) * 512 * SPARSE_RATIO >= state.st_size:
        return False
    try:  # file systems that do not count blocks (some FUSE ones) do not report holes either
        return os.lseek(handle, 0, os.SEEK_HOLE) < state.st_size
    except (OSError, AttributeError):
        return False
    finally:
        os.lseek(handle, 0, os.SEEK_SET)


def is_plain_file(path: Path) -> bool:
    """Whether it exists and is a regular file, after following links; never raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` with bounded depth, because it is recursive up to Python 3.11. Raises RequestError for a deeper
    folder."""
    levels = len(folder.parts) + DEEPEST_FOLDER
    for base, folders, names in os.walk(folder):
        if len(Path(base).parts) > levels:
            raise RequestError(f"{folder}: has folders nested deeper than {DEEPEST_FOLDER} levels.")
        yield base, folders, names


def refuse_outside(path: Path, folder: Path) -> None:
    """Raises RequestError if a link leads out of the folder; links in the hub's cache may lead to its blobs."""
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; a NUL
        raise RequestError(f"{path}: cannot be followed ({first_line(error)}).") from error
    snapshots, blobs = HUB_LINKS
    homes = [home, *([home.parent.parent / blobs] if home.parent.name == snapshots else [])]
    if not any(real.is_relative_to(one) for one in homes):
        raise RequestError(
            f"{path}: is a link that leads out of {folder}, and is not followed. Put the file itself there."
        )


def read_bytes(path: Path, most: int = MOST_BYTES, inside: Path | None = None, name: str | None = None) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises RequestError as `open_plain` does."""
    with open_plain(path, inside, name) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise RequestError(f"{name or path}: cannot be read ({error.strerror}).") from error
    if len(content) > most:
        size = f"{most / 2**20:,.0f} MiB" if most >= 2**20 else f"{most:,} bytes"
        raise RequestError(f"{name or path}: has more than {size}, which is the most that is read here.")
    return content


def read_bounded(
    path: Path, most: int = MOST_BYTES, inside: Path | None = None, name: str | None = None, keep_mark: bool = False
) -> str:
    """The text of a regular file, in UTF-8 with or without a BOM. Raises RequestError as `open_plain` does."""
    content = read_bytes(path, most, inside, name)
    if content.startswith(UTF_16_MARKS):
        raise RequestError(
            f"{name or path}: is UTF-16, as Windows PowerShell writes it, not UTF-8. Save it as UTF-8 "
            "in an editor, or in PowerShell with Get-Content FILE | Set-Content -Encoding utf8 NEW_FILE."
        )
    try:
        return content.decode("utf-8" if keep_mark else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name or path}: is not UTF-8 text ({first_line(error)}).") from error
