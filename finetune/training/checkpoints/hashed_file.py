"""Writes new files to the disk and hashes them on the way, with little of the processor's time.

Through the page cache a file is copied twice more: into it, and out of it to be hashed. Here whole chunks go past it
(O_DIRECT) where the file system can do that, and the disk writes a chunk while the next one is filled.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from finetune.training.checkpoints.manifest import READ_AND_WRITE, FileRecord

CHUNK_BYTES, CHUNKS = 8 * 2**20, 3
PIECE_BYTES = 2**20  # copied, and hashed while it is still in the processor's cache
BLOCK_BYTES = 4096  # O_DIRECT takes whole blocks from aligned memory (open(2))
FLUSHES = 4  # files that are flushed at the same time: a journal commits them together
DIRECT = getattr(os, "O_DIRECT", 0)
NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # what file systems without it answer


class Disk:
    """Writes files one after another, and flushes each while the next is written."""

    def __init__(self) -> None:
        self.writes, self.flushes = ThreadPoolExecutor(1), ThreadPoolExecutor(FLUSHES)
        self.chunks: deque[tuple[memoryview, Future[None] | None]] = deque(
            (memoryview(mmap.mmap(-1, CHUNK_BYTES)), None) for _ in range(CHUNKS)
        )

    def chunk(self) -> memoryview:
        """Memory to fill; waits until its earlier content is written."""
        chunk, written = self.chunks.popleft()
        if written is not None:
            wait([written])
        return chunk

    def send(self, handle: int, chunk: memoryview, size: int, offset: int) -> Future[None]:
        written = self.writes.submit(_write, handle, chunk[:size], offset)
        self.chunks.append((chunk, written))
        return written


class HashedFile:
    """A new file for libraries that write to an object, to be used in `with`, and `closed` at its end. Errors of the
    disk are raised by the record that it returns: `write` is called from C++."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.handle = _create(path)
        self.disk, self.digest = disk, xxhash.xxh3_128()
        self.chunk, self.filled, self.size = disk.chunk(), 0, 0
        self.sent: list[Future[None]] = []

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """If the library has failed, the disk gets its chunk back, and the handle is closed."""
        if kind is not None:
            self.disk.chunks.appendleft((self.chunk, None))
            wait(self.sent)
            os.close(self.handle)

    def write(self, content: Any) -> int:
        whole = memoryview(content)
        left = whole.cast("B") if whole.nbytes else whole
        while left:
            piece = self.chunk[self.filled : self.filled + min(len(left), PIECE_BYTES)]
            piece[:] = left[: len(piece)]
            self.digest.update(piece)
            self.filled, left = self.filled + len(piece), left[len(piece) :]
            if self.filled == CHUNK_BYTES:
                self._send()
                self.chunk = self.disk.chunk()
        return whole.nbytes

    def flush(self) -> None:
        """Do nothing: torch.save calls it at the end."""

    def closed(self) -> Future[FileRecord]:
        """The file's record, once it is on disk."""
        self._send()
        return self.disk.flushes.submit(self._close)

    def _send(self) -> None:
        self.sent.append(self.disk.send(self.handle, self.chunk, self.filled, self.size))
        self.size, self.filled = self.size + self.filled, 0

    def _close(self) -> FileRecord:
        try:
            for written in self.sent:
                written.result()
            os.fsync(self.handle)
        finally:
            os.close(self.handle)
        return FileRecord(self.size, self.digest.hexdigest())


def _create(path: Path) -> int:
    """Open a new file, as readable as its folder, and past the page cache if the file system can."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        handle = os.open(path, flags | DIRECT)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
        handle = os.open(path, flags)
    with suppress(OSError):  # some file systems have no modes
        os.fchmod(handle, path.parent.stat().st_mode & READ_AND_WRITE)
    return handle


def _write(handle: int, content: memoryview, offset: int) -> None:
    """The last chunk of a file, and all of a small one, go through the page cache."""
    while content:
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        if len(content) % BLOCK_BYTES or offset % BLOCK_BYTES:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~DIRECT)
        try:
            count = os.pwrite(handle, content, offset)
        except OSError as error:
            if error.errno not in NOT_DIRECT or not flags & DIRECT:
                raise
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~DIRECT)  # the file system opens such files, and cannot write
            continue
        if count == 0:
            raise OSError(errno.EIO, f"the disk takes nothing of {len(content):,} bytes at {offset:,}")
        content, offset = content[count:], offset + count
