"""What became of a process: killed, ended by itself, or gone before anybody looked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from finetune.training.watch import GONE, KILLED, RUNS, _Peers, _state


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_only_a_process_that_a_signal_ended_is_spoken_of() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    killed, ended = subprocess.Popen(sleeper), subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    peers = _Peers({0: os.getpid(), 1: killed.pid, 2: ended.pid})
    until(lambda: not peers.dead() and _state(ended.pid) != RUNS)
    killed.send_signal(signal.SIGKILL)
    until(lambda: _state(killed.pid) != RUNS)
    assert peers.dead() == {1: KILLED}
    for process in (killed, ended):
        process.wait()  # as a launcher does: now nothing is left of either
    assert peers.dead() == {1: GONE}


def test_a_rank_that_told_the_others_that_it_leaves_is_not_spoken_of_even_if_nobody_saw_how_it_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    ended.wait()
    peers = _Peers({0: os.getpid(), 1: ended.pid})
    assert peers.dead() == {1: GONE}
    assert peers.dead({1}) == {}
    assert peers.dead() == {}, "it is remembered"


def test_a_rank_that_is_killed_after_it_told_that_it_leaves_is_spoken_of() -> None:
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    killed.send_signal(signal.SIGKILL)
    until(lambda: _state(killed.pid) != RUNS)
    assert _Peers({0: os.getpid(), 1: killed.pid}).dead({1}) == {1: KILLED}
    killed.wait()
