"""Two ranks that are watched: what is no hang goes on, and what is one is named; a rank whose beats fail at times."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from finetune.training.guards import pulse as module
from finetune.training.guards.flight import Joined
from finetune.training.guards.pulse import Pulse
from finetune.training.guards.verdict import Heartbeat, Position, Verdict, position_of

NOT_JOINED = r"; rank 1 has not joined all_?reduce number [\d,]+ of 1,024 float32 in gloo's default group"
SCRIPT = Path(__file__).with_name("ranks_that_hang.py")


def until(condition: Callable[[], Any], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


class Ranks:
    """Two of ranks_that_hang.py in `folder`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.logs = folder, [(folder / f"log-{rank}").open("w") for rank in range(2)]
        command = [sys.executable, str(SCRIPT), str(folder)]
        self.processes = [
            subprocess.Popen([*command, str(rank), *words], stdout=log, stderr=subprocess.STDOUT)
            for rank, log in enumerate(self.logs)
        ]

    def steps(self) -> int:
        return min((int(file.read_text() or 0) for file in self.folder.glob("steps-*")), default=0)

    def go_on(self) -> None:
        assert [rank.poll() for rank in self.processes] == [None, None], self.said()
        more = self.steps() + 5
        until(lambda: self.steps() > more)

    def said(self) -> list[str]:
        return [line for log in self.logs for line in Path(log.name).read_text().splitlines()]


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    two = Ranks(tmp_path, *getattr(request, "param", ()))
    try:
        until(lambda: len(list(tmp_path.glob("steps-*"))) == 2 and two.steps() > 3)
        yield two
    finally:
        for rank in two.processes:
            rank.kill()
            rank.wait()
        for log in two.logs:
            log.close()


@pytest.mark.nightly  # suspends processes, and waits
@pytest.mark.parametrize("ranks", [["--hang_blame"]], indirect=True, ids=["--hang_blame"])
def test_a_run_that_is_suspended_or_slow_goes_on_and_one_that_hangs_ends_with_its_rank_named(ranks: Ranks) -> None:
    for rank in ranks.processes:
        rank.send_signal(signal.SIGSTOP)
    time.sleep(9)  # as a cluster suspends a job: longer than the 5 s after which a hang is one
    for rank in ranks.processes:
        rank.send_signal(signal.SIGCONT)
    ranks.go_on()
    (ranks.folder / "slow").touch()
    until(lambda: not (ranks.folder / "slow").exists())
    time.sleep(2)
    ranks.go_on()
    os.mkfifo(ranks.folder / "hang")
    assert ranks.processes[0].wait(60) == 1
    assert ranks.processes[1].wait(60) in (1, -signal.SIGKILL)  # by rank 0, where it has not ended itself before
    (line,) = [line for line in ranks.said() if line.startswith("error:")]
    assert line.startswith("error: rank 1 has not moved for ")
    assert "train (guards/ranks_that_hang.py:" in line
    assert re.search(NOT_JOINED, line), line


@pytest.mark.nightly  # waits
def test_a_rank_that_stands_still_is_named_each_time_and_the_run_goes_on_when_it_moves(ranks: Ranks) -> None:
    for times in (1, 2):
        os.mkfifo(ranks.folder / "hang")
        until(lambda times=times: "\n".join(ranks.said()).count("warning:") == times)
        time.sleep(3)  # it is said once
        with (ranks.folder / "hang").open("w") as pipe:
            pipe.write("go on")
        ranks.go_on()
    said = [line for line in ranks.said() if line]
    assert len(said) == 2, said
    for line in said:
        assert line.startswith("warning: rank 1 has not moved for ")
        assert "The run keeps waiting. --hang_blame True would end it" in line
        assert re.search(NOT_JOINED, line), line
    ranks.processes[0].send_signal(signal.SIGSTOP)  # a rank that is silent is lost, whatever the flag
    assert ranks.processes[1].wait(60) == 1


@pytest.mark.nightly  # waits
def test_a_rank_that_is_stopped_is_reported_with_the_collective_in_which_the_others_wait(ranks: Ranks) -> None:
    ranks.processes[1].send_signal(signal.SIGSTOP)
    assert ranks.processes[0].wait(60) == 1
    (line,) = [line for line in ranks.said() if line.startswith("error:")]
    assert line.startswith("error: rank 1 has not responded for ")
    assert re.search(r"; rank 0 has joined all_?reduce number \d+ of 1,024 float32 .*, which has not ended", line), line


@pytest.mark.nightly  # waits
def test_a_rank_that_fails_and_is_reaped_at_once_is_not_also_reported_as_gone(ranks: Ranks) -> None:
    (ranks.folder / "fail").touch()
    assert ranks.processes[0].wait(60) == 1  # the test is the parent: the process is gone when this returns
    time.sleep(3)
    said = ranks.said()
    assert any("an error of its own" in line for line in said)
    assert not [line for line in said if "is gone" in line], said


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class BadStore:
    """Every other call fails, as a network may, and in words that are no DistError."""

    port = 1

    def __init__(self) -> None:
        self.calls, self.beats = 0, set()

    def set(self, name: str, value: str) -> None:
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("the network has hiccups")
        self.beats.add(json.loads(value)["number"])


def cannot_be_seen(thread: int) -> Position:
    raise OSError(24, "Too many open files")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("look", [position_of, cannot_be_seen])
def test_a_beat_that_fails_is_one_beat_lost(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "position_of", look)
    store = BadStore()
    pulse = Pulse(store, 60.0, {}, str)
    pulse.start()
    until(lambda: len(store.beats) >= 3, 20)
    pulse.leave()


@pytest.mark.usefixtures("alone")
def test_a_run_ends_though_its_verdict_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    Pulse(BadStore(), 60.0, {}, str)._end(Verdict((), "rank 1 hangs"))
    assert ended == [1]


WAITS = Joined("gloo's default group", 42, "all_reduce", "of 1,024 float32", True)


@pytest.mark.usefixtures("alone")
def test_the_recorder_is_read_when_a_verdict_is_near_and_not_at_each_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []

    def read() -> tuple[Joined, ...]:
        reads.append(time.monotonic())
        if len(reads) > 1:
            raise RuntimeError("another form in another torch")
        return (WAITS,)

    monkeypatch.setattr(module, "position_of", lambda thread: Position("here", "", "key"))
    pulse = Pulse(SimpleNamespace(port=1), 60.0, {}, str)
    monkeypatch.setattr(pulse, "recorder", SimpleNamespace(read=read))
    pulse._look()
    pulse.since -= 36  # a rank is silent after 40
    pulse._look()
    assert (reads, pulse.own.joined) == ([], ())
    pulse.since -= 2
    pulse._look()
    pulse._look()
    assert (len(reads), pulse.own.joined) == (1, (WAITS,))
    pulse.tick()
    pulse._look()
    assert pulse.own.joined == ()
    pulse.since -= 38
    pulse._look()
    assert (len(reads), pulse.own.joined, pulse.own.number) == (2, (), 6)


def test_a_heartbeat_arrives_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, str] = {}
    store = SimpleNamespace(port=1, set=kept.__setitem__, get=kept.__getitem__, check=lambda names: names[0] in kept)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    ranks = iter((0, 1))
    monkeypatch.setattr(distributed, "get_rank", lambda: next(ranks))
    first, second = Pulse(store, 60.0, {}, str), Pulse(store, 60.0, {}, str)
    second.own = Heartbeat(1, 7, Position("there", "all_reduce", "key"), 38.0, 39.0, joined=(WAITS,))
    second._tell()
    first._exchange()
    assert first.seen == {1: second.own}


@pytest.mark.parametrize(("rank", "told"), [(0, ["[1]"]), (1, [])])
def test_the_first_rank_alone_tells_the_verdict(rank: int, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    for name in ("BEAT_SECONDS", "QUIET_RANKS_WAIT_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    store = SimpleNamespace(port=1, set=lambda name, value: heard.append(value))
    Pulse(store, 60.0, {}, str)._speak_and_end_others(Verdict((1,), "rank 1 hangs"))
    assert heard == told


@pytest.mark.parametrize(("rank", "others"), [(0, [1, 2]), (1, [0]), (2, [0])])
def test_the_first_rank_watches_all_others_and_they_watch_it(
    rank: int, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    assert list(Pulse(SimpleNamespace(port=1), 60.0, {}, str).others) == others
