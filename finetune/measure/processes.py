"""Start processes so that all their descendants can be ended: torchrun puts each rank into its own session, which a
signal to the process group does not reach. So each carries a mark in its environment, which its children inherit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from finetune.measure.outcome import Outcome, outcome_of
from finetune.run.environment import environment_of_child, processes_with
from finetune.run.launch import free_port

PYTHON, TORCHRUN, DEEPSPEED = "python", "torchrun", "deepspeed"
MARK = "FINETUNE_TRIAL"
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL


def words(flags: Mapping[str, object]) -> list[str]:
    """`flags` as command-line words."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def started(launcher: str, ranks: int) -> list[str]:
    """The launcher's part of a command, with a free port. Launchers run as modules, since their console scripts may be
    anywhere."""
    if launcher == PYTHON:
        return [sys.executable]
    port = ["--master_port", str(free_port())]
    if launcher == DEEPSPEED:
        return [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), *port]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *port]


def run(command: Sequence[str], log: Path, patience: float) -> Outcome:
    """Run `command` for at most `patience` seconds, with its output in `log`; returns how it ended."""
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
    """Yields a mark for the environment. However the block ends, SIGTERM included, no process with the mark is left."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)  # otherwise SIGTERM would end this process but not those it started

    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # no other can set handlers
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, leave))
        try:
            yield {MARK: mark}
        finally:
            for end in (psutil.Process.terminate, psutil.Process.kill):
                members = processes_with(MARK, mark)
                for member in members:
                    with suppress(psutil.Error):
                        end(member)
                psutil.wait_procs(members, GRACE_SECONDS)
