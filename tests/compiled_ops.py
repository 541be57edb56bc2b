"""DeepSpeed's compiled ops, built once for a stack and found again by every later test session on the machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from finetune.doctor import ops

PATIENCE_SECONDS = 1500


def folder_of_this_stack() -> Path:
    """Outside the checkout. ninja builds over where the sources lie elsewhere or are newer, so that the environment and
    the time at which DeepSpeed was installed into it are in the key."""
    compiler = shutil.which("g++") and subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    sources = find_spec("deepspeed")
    assert sources is not None
    assert sources.origin is not None
    installed = Path(sources.origin).stat().st_mtime_ns
    key = (version("torch"), version("deepspeed"), platform.python_version(), sys.prefix, installed, compiler, flags)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "finetune-tests" / f"ops-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


def enter(folder: Path) -> TextIO:
    """Have torch build and look there, and hold the returned file for as long as the session lasts. Who comes into an
    empty room clears the locks in it: a process that was killed in a build leaves one, on which every start waits."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    sessions = (folder / "sessions").open("a")
    with suppress(BlockingIOError):  # another test session goes on, and may be building
        fcntl.flock(sessions, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in folder.glob("*/lock"):
            lock.unlink()
    fcntl.flock(sessions, fcntl.LOCK_SH)
    return sessions


def build(which: str) -> None:
    """The ops that finetune.doctor.ops has under this name. One process builds; the others wait for it."""
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"built-{which}"
    with (folder / "building").open("a") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        if done.is_file() or not shutil.which("g++"):
            return
        command = [sys.executable, "-m", "finetune.doctor.ops", *getattr(ops, which)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert built.returncode == 0, built.stderr[-3000:]
        done.touch()
