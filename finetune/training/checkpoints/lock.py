"""One run per run folder at a time. The lock is released when its process ends, however it ends. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import BusyError, RequestError, RunError
from finetune.run.files import IDENTITY, LOCK, SUPERVISION
from finetune.run.supervised import own_attempt

# The previous run's ranks may still be ending, or its host may have failed: an NFS server keeps a dead client's lock
# for about 90 s, its lease (Linux, Documentation/filesystems/nfs/nfsd-admin-interfaces.rst).
RESUMED_WAITS_SECONDS = 120.0
POLL_SECONDS = 0.2
OWNER_BYTES = 4096


@dataclass
class _Lock:
    """`handle`: a file descriptor; closing it releases the lock. `record`: what says whose run the folder holds, as it
    was while this process had the lock; empty until it is read."""

    handle: int
    command: str
    record: bytes = b""


_held: dict[Path, _Lock] = {}  # by this process


def lock_run_folder(
    folder: Path, command: str, wait_seconds: float = 0.0, run_folder: Path | None = None
) -> str | None:
    """Lock the folder until this process ends. Returns None, or a note to print if the disk does not support locks.
    Raises an error that names the owner, and `run_folder` if that is another: BusyError after waiting, else
    RequestError. Only rank 0 calls it."""
    path = folder.resolve() / LOCK
    if path in _held:
        return None
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    end, has_said = time.monotonic() + wait_seconds, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = _owner(handle)
            if time.monotonic() < end:
                if not has_said:
                    print(f"waiting up to {wait_seconds:.0f} s for another run in {folder}: {owner}", flush=True)
                    has_said = True
                time.sleep(POLL_SECONDS)
                continue
            os.close(handle)
            raise (BusyError if has_said else RequestError)(
                f"--output_dir {run_folder or folder}: another run writes there ({owner}). Wait until it ends, stop "
                "it, or give another folder."
            ) from None
        except OSError as error:  # some network disks
            os.close(handle)
            return f"note: {folder} cannot be locked ({error.strerror}). Make sure that no other run writes there."
    if not _held:
        os.register_at_fork(after_in_child=give_up_locks)  # a data loader worker may outlive its rank
    _held[path] = _Lock(handle, command)
    record = {"host": socket.gethostname(), "pid": os.getpid(), "command": command}
    record["started"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with suppress(OSError):  # disk full: the lock is held all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(record).encode()[:OWNER_BYTES], 0)
    return None


def refuse_supervised(folder: Path) -> None:
    """Raises RequestError if a supervisor that did not start this process keeps a run going in the folder. Between two
    of its attempts, nobody holds the run's own lock."""
    home, own = folder.resolve() / SUPERVISION, own_attempt()
    if own is not None and own.resolve().is_relative_to(home):
        return
    for path in (home / LOCK, *home.glob(f"host-*/{LOCK}")):
        with suppress(OSError), path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RequestError(
                    f"--output_dir {folder}: a supervisor keeps a run going there ({_owner(file.fileno())}). Wait "
                    "until it ends, stop it, or give another folder."
                ) from None


def keep_locked(folder: Path) -> None:
    """Lock the folder again if its lock file was deleted under this run; does nothing without a lock. Raises RunError
    if the folder is gone, or another run has locked it or begun in it since."""
    path = folder.resolve() / LOCK
    if path not in _held:
        return
    lock = _held[path]
    try:
        is_there = os.path.samestat(os.fstat(lock.handle), path.stat())
    except OSError as error:  # NFS says of a deleted file that its handle is stale; other errors may pass
        is_there = error.errno not in (errno.ENOENT, errno.ESTALE)
    if is_there:
        lock.record = lock.record or _record_in(path.parent)
        return
    if _record_in(path.parent) not in (b"", lock.record):
        raise RunError(f"{path} was deleted under this run, and another run has begun in the folder. Nothing is saved.")
    with suppress(OSError):
        os.close(lock.handle)
    del _held[path]
    try:
        note = lock_run_folder(folder, lock.command)
    except FileNotFoundError as error:
        raise gone(folder) from error
    except RequestError as error:
        raise RunError(f"{path} was deleted under this run. {error}") from error
    if path in _held:
        _held[path].record = lock.record
    print(note or f"warning: {path} was deleted under this run, which has locked the folder again.", flush=True)


def _record_in(folder: Path) -> bytes:
    with suppress(OSError):
        return (folder / IDENTITY).read_bytes()
    return b""


def is_missing(folder: Path, error: BaseException) -> bool:
    """Whether this error came because the folder is gone. torch names the parent directory (caffe2/serialize)."""
    is_named = isinstance(error, FileNotFoundError) or "Parent directory" in str(error)
    return is_named and not os.path.exists(folder)  # unlike Path.exists, without an error of its own


def gone(folder: Path) -> RunError:
    return RunError(
        f"{folder} is gone: it was deleted, renamed or unmounted under the run, with what was saved there. Bring it "
        "back, then --resume allow; or start anew."
    )


def give_up_locks() -> None:
    """Close the file descriptors: in a forked child, which does not release the parent's locks, or after a run whose
    process continues."""
    for lock in _held.values():
        with suppress(OSError):
            os.close(lock.handle)
    _held.clear()


def _owner(handle: int) -> str:
    try:
        found = json.loads(os.pread(handle, OWNER_BYTES, 0))
        words = {name: str(found[name])[:300] for name in ("pid", "host", "started", "command")}
    except (ValueError, KeyError, TypeError, RecursionError):
        return "the owner has not recorded its name yet"
    return f"process {words['pid']} on {words['host']}, started {words['started']}: {words['command']}"
