"""Processes that end with all that came of them: torchrun starts each rank in a session of its own, which no signal to
a group reaches. What is started here carries a mark in its environment, and hands it on to whatever it starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from finetune.measure.outcome import Outcome, outcome_of
from finetune.run.child import environment_of_child
from finetune.run.launch import free_port

PYTHON, TORCHRUN, DEEPSPEED = "python", "torchrun", "deepspeed"
MARK = "FINETUNE_TRIAL"
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL


def words(flags: Mapping[str, object]) -> list[str]:
    """A command line's part."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def started(launcher: str, ranks: int) -> list[str]:
    """The launcher's part of a command, on a port of its own. Launchers are modules: their console scripts may lie
    anywhere."""
    if launcher == PYTHON:
        return [sys.executable]
    port = ["--master_port", str(free_port())]
    if launcher == DEEPSPEED:
        return [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), *port]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *port]


def run(command: Sequence[str], log: Path, patience: float) -> Outcome:
    """How it has ended, be that after `patience` seconds; what it says goes into `log`."""
    with log.open("w", encoding="utf-8") as stream, all_ended() as mark:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=environment_of_child() | mark
        )
        try:
            status = process.wait(patience)
        except subprocess.TimeoutExpired:
            status = None
    return outcome_of(status, log.read_text(encoding="utf-8", errors="replace"), patience)


@contextmanager
def all_ended() -> Iterator[dict[str, str]]:
    """Gives the mark. However what stands inside ends, SIGTERM included, no process with it is left."""
    mark = uuid.uuid4().hex
    with _sigterm_raises():
        try:
            yield {MARK: mark}
        finally:
            for end in (psutil.Process.terminate, psutil.Process.kill):
                members = marked(mark)
                for member in members:
                    with suppress(psutil.Error):
                        end(member)
                psutil.wait_procs(members, GRACE_SECONDS)


def marked(mark: str) -> list[Any]:
    """Processes by their environment: one whose parent has died is no child of anybody's here."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is somebody else's
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM would end this process, and nothing that it has started. Handlers are the main thread's alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
