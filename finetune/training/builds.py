"""DeepSpeed compiles its ops on first use: which ops a run needs, and whether a process is compiling them now."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.dsconfig.config import Config
from finetune.errors import RequestError

# A lock that no process here has open may belong to another host or container that shares the folder. The slowest op,
# async_io, took five minutes to compile on two busy cores.
STALE_BUILD_SECONDS = 900.0
SAID_AFTER_SECONDS = 5.0  # an op that is already built loads in less
LOOKS_EVERY_SECONDS = 1.0


def ops_of(config: dict[str, Any], has_cuda: bool) -> set[str]:
    """The folder names of the ops that a run with this config compiles (deepspeed 0.19.8, op_builder/, NAME)."""
    asked = Config(config)
    devices = {asked.offload(what) for what in ("offload_optimizer", "offload_param")}
    kind = str(asked.get("optimizer.type") or "adamw").lower()
    ops = set() if has_cuda else {"deepspeed_shm_comm"}
    if asked.offload("offload_optimizer") != "none":
        ops.add({"adagrad": "cpu_adagrad", "lion": "cpu_lion"}.get(kind, "cpu_adam"))
    elif "optimizer" in config and not asked.is_on("optimizer.params.torch_adam"):
        ops |= {"adam": {"fused_adam"}, "adamw": {"fused_adam"}, "lion": {"fused_lion"}, "lamb": {"fused_lamb"}}.get(
            kind, set()
        )
    return ops | ({"async_io"} if "nvme" in devices else set())


def stale_builds(ops: Collection[str] | None = None) -> list[tuple[Path, float]]:
    """Locks of these ops (None: of any) left by a process that was killed while it compiled or loaded one, and their
    ages in seconds. torch waits for such a lock forever and silently (torch/utils/file_baton.py). The process that
    made the lock holds it open while it builds."""
    held = _open_files()
    old = [(lock, age) for lock, age in _locks(ops) if age > STALE_BUILD_SECONDS]
    return [(lock, age) for lock, age in old if str(lock.resolve()) not in held]


def refuse_stale_builds(ops: Collection[str]) -> None:
    """Raises RequestError if this run would wait for a build that no process is doing."""
    for lock, age in stale_builds(ops):
        raise RequestError(
            f"{lock}: a build of DeepSpeed's {lock.parent.name} was interrupted {age / 60:.0f} minutes ago, and this "
            "run would wait for it forever: no process here has the file open. Delete it, unless another machine is "
            "compiling in this folder right now."
        )


Build = tuple[Path, int, int]  # its lock, and of this the inode and when it was made


def builds_of(processes: Callable[[], Iterable[int]]) -> set[Build]:
    """The builds whose locks these processes, by their numbers, hold now; they are only asked for if there is any."""
    builds = _builds()
    held = _open_files(processes()) if builds else set()
    return {build for build in builds if str(build[0].resolve()) in held}


def give_up_builds(builds: Iterable[Build]) -> list[str]:
    """Delete the locks that are still there and that no process here holds any more, so that the next run compiles
    anew. A later build of another machine has a lock of its own. Returns the ops' names."""
    same = sorted(_builds() & {*builds})
    held = _open_files() if same else set()
    left = [lock for lock, *_ in same if str(lock.resolve()) not in held]
    for lock in left:
        lock.unlink(missing_ok=True)
    return [lock.parent.name for lock in left]


def _builds() -> set[Build]:
    found = set()
    for lock, _ in _locks(None):
        with suppress(OSError):  # the build has just ended
            made = lock.stat()
            found.add((lock, made.st_ino, made.st_mtime_ns))
    return found


def tell_of_builds(ops: Collection[str]) -> None:
    """From now on, print on this rank which of these ops is being compiled, and when it is done."""
    if ops:
        threading.Thread(target=_tell, args=(frozenset(ops),), name="builds", daemon=True).start()


def _tell(ops: frozenset[str]) -> None:
    seen: dict[str, float] = {}
    told: set[str] = set()
    while True:
        now = time.monotonic()
        locked = {lock.parent.name: lock for lock, _ in _locks(ops)}
        for op, lock in locked.items():
            if now - seen.setdefault(op, now) > SAID_AFTER_SECONDS and op not in told:
                told.add(op)
                print(_at_work(op, lock), flush=True)
        for op in [op for op in seen if op not in locked]:
            if op in told:
                print(f"compiled {op} in {now - seen[op]:.0f} s", flush=True)
                told.discard(op)
            del seen[op]
        time.sleep(LOOKS_EVERY_SECONDS)


def _at_work(op: str, lock: Path) -> str:
    if str(lock.resolve()) in _open_files():
        return f"compiling DeepSpeed's {op}, which takes minutes. It is kept for later runs of this environment"
    return (
        f"waiting for a build of DeepSpeed's {op} that no process here is running: a killed one left {lock}. "
        "Stop this run, delete the file and start again, unless another machine or container is compiling there now."
    )


def _locks(ops: Collection[str] | None) -> Iterator[tuple[Path, float]]:
    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for name in ["*"] if ops is None else sorted(ops):
        for depth in ("", "*/"):  # torch adds a folder for the Python and CUDA versions, unless the variable is set
            for lock in home.glob(f"{depth}{name}/lock"):
                with suppress(OSError):  # the build has just ended
                    yield lock, time.time() - lock.stat().st_mtime


def _open_files(processes: Iterable[int] | None = None) -> set[str]:
    """Files that these processes (None: all visible to us) have open; empty on a system without /proc."""
    found = set()
    proc = Path("/proc")
    for process in proc.glob("[0-9]*") if processes is None else [proc / str(number) for number in processes]:
        with suppress(OSError):  # it has just ended, or is another user's
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):
                    found.add(os.readlink(process / "fd" / descriptor))
    return found
