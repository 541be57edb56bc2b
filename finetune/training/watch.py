"""Detect a killed or hanging rank and name it: otherwise the other ranks would hang in a collective, or fail with a
library's message about a closed connection. Used by the trainers of both engines."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

from finetune.errors import RunError
from finetune.run.supervised import tell_end
from finetune.training.checkpoints.writing import every
from finetune.training.guards.memory import advice, oom_kills
from finetune.training.guards.pulse import (
    HEARD_SECONDS,
    HURRIED_SECONDS,
    MEND,
    QUIET_RANKS_WAIT_SECONDS,
    Pulse,
    begin_pulse,
)
from finetune.training.interruption import StopOnSignal

POLL_SECONDS = 0.2
TERMINATED = 143  # 128 + SIGTERM, the shell convention
# Parts of the messages of gloo and NCCL when the peer is gone (torch 2.13).
BROKEN_TRANSFER = ("connection closed by peer", "connection reset", "remote process exited", "timed out", "socket")
RUNS, ENDED, KILLED, GONE = "runs", "has ended", "was killed", "is gone"


@contextmanager
def watching(
    name_of: Callable[[int], str], stop: StopOnSignal, folder: Path, hang_timeout: float = 0.0, hang_blame: bool = False
) -> Iterator[Callable[[], None]]:
    """In this block, if a signal kills a rank of this machine, the others end within seconds with one message;
    `name_of` gives the rank's description. All ranks must enter it together and leave it before they exit. With
    `hang_timeout` (seconds) the same applies to a rank of any machine that sends no heartbeat, and with `hang_blame` to
    one that stands still (finetune.training.guards.verdict); call the yielded function whenever there is progress.
    `folder` is the run's; `stop` is the training's callback.

    The lowest living rank prints the message. A launcher may notice the death first and end the others: SIGTERM only
    wakes the watch thread, which checks, prints, and then ends the process. If no rank has ended and `stop` listens,
    the signal asks training to stop, and the watch leaves it to `stop`.
    """
    if not distributed.is_initialized():
        yield lambda: None
        return
    host = socket.gethostname()
    # Containers may share a host name but not see each other's processes.
    told = enumerate(every((host, os.getpid())))
    peers = _Peers({rank: pid for rank, (its, pid) in told if its == host and _state(pid) != GONE})
    done = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_handler = signal.signal(signal.SIGTERM, lambda *_: None)
    old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    pulse = begin_pulse(hang_timeout, hang_blame, peers.pids, name_of, lambda: stop.steps > 0)
    given = (peers, distributed.get_rank(), reader, done, name_of, stop, folder, pulse)
    watch = threading.Thread(target=_watch, args=given, daemon=True)
    watch.start()
    try:
        yield pulse.tick if pulse else lambda: None
    except Exception as error:
        _wait_for_words(error, peers, pulse)
        if pulse:  # a launcher may reap this rank before the others see that it ended with its own error
            pulse.leave(linger_seconds=HEARD_SECONDS)
        raise
    finally:
        if pulse:
            pulse.leave()
        done.set()
        signal.set_wakeup_fd(old_fd)
        signal.signal(signal.SIGTERM, old_handler)
        os.write(writer, b"\0")
        watch.join()
        os.close(reader)
        os.close(writer)


def _wait_for_words(error: Exception, peers: _Peers, pulse: Pulse | None) -> None:
    """If another rank is gone, wait for the watch to end this process, so that the library's error is not shown."""
    if peers.dead():
        time.sleep(QUIET_RANKS_WAIT_SECONDS)
    elif pulse and any(words in str(error).lower() for words in BROKEN_TRANSFER):
        pulse.hurry()
        time.sleep(2 * HURRIED_SECONDS)


def _watch(
    peers: _Peers,
    rank: int,
    reader: int,
    done: threading.Event,
    name_of: Callable[[int], str],
    stop: StopOnSignal,
    folder: Path,
    pulse: Pulse | None,
) -> None:
    told_to_end, kills = False, oom_kills()
    while not done.is_set():
        woken, _, _ = select.select([reader], [], [], POLL_SECONDS)
        told_to_end |= bool(woken) and signal.SIGTERM in os.read(reader, 4096)
        dead = {} if done.is_set() else peers.dead(pulse.left if pulse else ())
        if dead:
            living = min(set(peers.pids) - set(dead))
            if pulse and pulse.has_spoken:
                time.sleep(QUIET_RANKS_WAIT_SECONDS)
            elif rank == living:
                names = ", ".join(f"{name_of(other)} {what}{_by(peers.pids[other])}" for other, what in dead.items())
                said = f"{names}, and the run cannot go on without it. {_why(kills, folder)}"
                print(f"\nerror: {said}{MEND}", file=sys.stderr, flush=True)
                telling = threading.Thread(target=tell_end, args=(1, RunError(said)), daemon=True)  # a disk may hang
                telling.start()
                telling.join(QUIET_RANKS_WAIT_SECONDS)
            else:
                time.sleep(QUIET_RANKS_WAIT_SECONDS)
            os._exit(1)
        if told_to_end and not (stop.listens and peers.all_run()):
            os._exit(TERMINATED)


def _why(kills_before: int, folder: Path) -> str:
    """A sentence if the kernel has killed a process of this cgroup for lack of memory since the watch began."""
    if oom_kills() == kills_before:
        return ""
    return f"The kernel killed a process for lack of memory (memory.events of the cgroup). {advice(folder)} "


def _by(pid: int) -> str:
    """The signal that killed a process, as text; "" if its parent has already reaped it."""
    try:
        number = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1]) & 0x7F
        return f" by {signal.Signals(number).name}" + (" (a mapped file was cut off?)" * (number == signal.SIGBUS))
    except (OSError, ValueError):
        return ""


class _Peers:
    """The processes of this machine's ranks. A rank that exited by itself has reported why and is not reported again;
    it is remembered, because its process disappears once the launcher reaps it."""

    def __init__(self, pids: dict[int, int]) -> None:
        self.pids = pids
        self.ended: set[int] = set()

    def all_run(self) -> bool:
        return all(_state(pid) == RUNS for pid in self.pids.values())

    def dead(self, left: Iterable[int] = ()) -> dict[int, str]:
        """Maps dead ranks to what happened to them, except those that exited, or vanished after they had `left`."""
        states = {rank: _state(pid) for rank, pid in self.pids.items()}
        self.ended |= {rank for rank, state in states.items() if state == ENDED}
        self.ended |= {rank for rank in left if states.get(rank) == GONE}
        return {rank: state for rank, state in states.items() if state in (KILLED, GONE) and rank not in self.ended}


def _state(pid: int) -> str:
    """From /proc/PID/stat: a zombie whose exit code, the last field, holds a signal was killed (proc(5))."""
    if not Path("/proc/self/stat").exists():
        return RUNS
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return GONE
    if fields[0] not in "ZX":
        return RUNS
    return KILLED if int(fields[-1]) & 0x7F else ENDED
