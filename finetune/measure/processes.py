"""Processes that end with all that came of them: torchrun starts each rank in a session of its own, which no signal to
a group reaches. What is started here carries a mark in its environment, and hands it on to whatever it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import psutil

MARK = "FINETUNE_TRIAL"
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL
POLL_SECONDS = 0.2


def words(flags: Mapping[str, object]) -> list[str]:
    """A command line's part."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def run(command: Sequence[str], output: IO[str], patience: float) -> int | None:
    """The exit status; None where it was not done after `patience` seconds."""
    with _all_ended() as mark:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | mark
        )
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            return None


def run_together(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[int | None]:
    """The exit statuses of commands, each with its environment, that wait for one another: once one has failed the rest
    are ended, and have None."""
    with _all_ended() as mark:
        processes = [subprocess.Popen(command, env={**environment, **mark}) for command, environment in commands]
        while True:
            statuses = [process.poll() for process in processes]
            if any(statuses) or None not in statuses:
                return statuses
            time.sleep(POLL_SECONDS)


@contextmanager
def _all_ended() -> Iterator[dict[str, str]]:
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
