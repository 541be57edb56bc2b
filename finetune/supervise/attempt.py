"""One attempt: the command, the processes that come of it, and what its folder says of its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from finetune.errors import INTERRUPTED, RequestError
from finetune.run import supervised
from finetune.run.environment import path_of_programs, processes_with
from finetune.supervise.command import Command
from finetune.supervise.decide import TRY_AGAIN, End
from finetune.training.builds import Build, builds_of, give_up_builds
from finetune.training.checkpoints.manifest import CHECKPOINT, checkpoints_in

MARK = "FINETUNE_SUPERVISOR"  # in the environment of every process that comes of a supervisor's command
POLL_SECONDS = 0.2
INTERRUPTED_SECONDS = 5.0  # for ranks that the terminal has interrupted: to begin to end
LEFT_OVER_SECONDS = 120.0  # for ranks that outlive their launcher: to save, before they are killed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Requested:
    """The signal that asks this supervisor to stop; 0 as long as none has come."""

    def __init__(self) -> None:
        self.number, self.times, self.at = 0, 0, 0.0
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self.number, self.times, self.at = self.number or number, self.times + 1, self.at or time.monotonic()

    @property
    def status(self) -> int:
        return INTERRUPTED if self.number == signal.SIGINT else TRY_AGAIN

    def pause(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        end = time.monotonic() + seconds
        while not self.number and time.monotonic() < end:
            time.sleep(min(POLL_SECONDS, seconds))


def run_attempt(
    words: Sequence[str], for_ranks: Mapping[str, str], requested: Requested, look: Callable[[], None]
) -> int:
    """Run the command, with these variables in its environment; returns its exit status once none of its processes is
    left, nor a lock of theirs on a build, for which the next attempt would wait forever. A signal to this process makes
    the ranks of this host save, and with them all others. `look` is called now and then. Raises RequestError if the
    command cannot be started."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, **for_ranks, MARK: mark}
    # Otherwise an agent whose rank changes as hosts come keeps the address of the earlier rank 0 (torch 2.13,
    # rendezvous/dynamic_rendezvous.py, next_rendezvous), and ranks wait for one another in two places.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # seconds to save, as in --stop_grace
    environment["PATH"] = path_of_programs()
    try:
        process = subprocess.Popen(words, env=environment)
    except OSError as error:
        raise RequestError(
            f"{words[0]} cannot be started: {error.strerror}. Give a launcher's command after --."
        ) from None
    building: set[Build] = set()

    def look_at_builds() -> None:
        nonlocal building
        building |= builds_of(lambda: [member.pid for member in processes_with(MARK, mark)])
        look()

    try:
        status = _wait(process, mark, requested, look_at_builds)
    finally:  # whatever happens to this process, no rank may train on without a supervisor
        _end_left_over(mark, requested)
    if ops := give_up_builds(building):
        print(f"supervise: a build of {', '.join(ops)} was cut off; the next start begins anew", flush=True)
    return status if status >= 0 else 128 - status


def _wait(process: subprocess.Popen[bytes], mark: str, requested: Requested, look: Callable[[], None]) -> int:
    """Until the launcher ends; returns what subprocess gives as its status."""
    passed_on, interrupted = 0, set[psutil.Process]()
    while (status := process.poll()) is None:
        if requested.times > passed_on:
            passed_on = requested.times
            interrupted = _pass_on(requested, mark, process)
        if interrupted and time.monotonic() - requested.at > INTERRUPTED_SECONDS:
            members = processes_with(MARK, mark)
            if interrupted <= set(members):  # none has ended, so it was no terminal, but `kill -INT`
                _signal(_ranks(members) or [psutil.Process(process.pid)], signal.SIGINT)
            interrupted.clear()
        time.sleep(POLL_SECONDS)
        look()
    return status


def _pass_on(requested: Requested, mark: str, process: subprocess.Popen[bytes]) -> set[psutil.Process]:
    """SIGTERM to the ranks of this host, because launchers treat signals differently (docs/launch.md). A terminal sends
    SIGINT to them itself: returned are those that should then end. A second one kills them."""
    members = processes_with(MARK, mark)
    ranks = _ranks(members) or [psutil.Process(process.pid)]
    if requested.number != signal.SIGINT:
        _signal(ranks, signal.SIGTERM)
    elif requested.times > 1:
        _signal(members, signal.SIGKILL)
    else:
        return set(ranks)
    return set()


def _end_left_over(mark: str, requested: Requested) -> None:
    """End the ranks that outlive their launcher: they would train on in the folder that the next attempt writes."""
    asked_at = None
    while members := processes_with(MARK, mark):
        if asked_at is None:
            asked_at = time.monotonic()
            _signal(_ranks(members) or members, signal.SIGTERM)
        elif time.monotonic() - asked_at > LEFT_OVER_SECONDS or requested.times > 1:
            _signal(members, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _ranks(members: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that a launcher has started as ranks; not what ranks start, such as data loader workers."""
    ranks = {}
    for process in members:
        with suppress(psutil.Error):
            if "RANK" in process.environ():
                ranks[process.pid] = (process, process.ppid())
    return [process for process, parent in ranks.values() if parent not in ranks]


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def end_of(attempt: Path, status: int, command: Command) -> End:
    """How the attempt ended. What a rank has told of itself counts for more than the launcher's exit status."""
    number = supervised.number_of(attempt)
    own = [one for one in supervised.told(attempt.parent) if one.get("attempt") == number]
    last_start = max((i for i, one in enumerate(own) if one["event"] == supervised.TRAINING), default=-1)
    ended = [one for one in own[last_start + 1 :] if one["event"] == supervised.ENDED]
    first = next((one for one in ended if one.get("status") != 0), {})
    if any(one.get("status") == 0 for one in ended) or (status == 0 and command.hosts is None):
        status = 0
    elif first.get("status") == INTERRUPTED and first.get("host") != socket.gethostname():
        status = TRY_AGAIN  # Ctrl-C is for the host of its terminal; here it is a host that is lost
    else:  # torchrun ends with 0 on a host that was not needed, once the others fail
        status = int(first.get("status", status)) or TRY_AGAIN
    step, was_read = _step_of(attempt)
    rows = _samples_of(attempt)
    ahead = rows.get("ahead", []) if was_read else []
    return End(status, step, newest_step(command.folder), rows.get("step"), ahead, first.get("most_hosts"))


def signal_in(status: int) -> str:
    """The signal behind an exit status, as ` (SIGKILL)`: shells and torchrun add 128 to its number, and DeepSpeed's
    launcher exits with the negative, of which 256 - number is left (deepspeed/launcher/launch.py). Empty if none."""
    number = status - 128 if status < 192 else 256 - status
    return f" ({signal.Signals(number).name})" if number in {*signal.Signals} else ""


def newest_step(run_folder: Path) -> int:
    """The step of the newest checkpoint by its name; 0 without any."""
    newest = next(iter(checkpoints_in(run_folder)), None)
    found = CHECKPOINT.fullmatch(newest.name) if newest else None
    return int(found[1]) if found else 0


def _step_of(attempt: Path) -> tuple[int | None, bool]:
    """The last step that the ranks worked on, None if none did, or if one was saving or evaluating; and whether all of
    them were still reading its samples."""
    places: dict[str, list[int]] = {"reading": [], "step": [], "after": []}
    for path in attempt.glob(f"{supervised.POSITION}*"):
        with suppress(OSError, ValueError, AttributeError, KeyError):
            for name, step in json.loads(path.read_text()).items():
                places[name].append(int(step))
    step = max([*places["reading"], *places["step"]], default=None)
    after = max(places["after"], default=None)
    if step is None or (after is not None and step <= after + 1):
        return None, False
    return step, step not in places["step"]


def _samples_of(attempt: Path) -> dict[str, list[int]]:
    with suppress(OSError, ValueError, AttributeError, TypeError):
        found = json.loads((attempt / supervised.SAMPLES).read_text())
        return {name: [int(one) for one in rows] for name, rows in found.items()}
    return {}
