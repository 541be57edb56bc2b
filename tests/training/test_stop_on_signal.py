"""The vote of the ranks, on the machine at hand; what comes of it is tried by tests/runs/test_interruption.py."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from transformers import TrainerControl
from transformers.trainer_utils import SaveStrategy

from finetune.errors import InterruptedRunError
from finetune.training.interruption import SAVE_AGAIN, StopOnSignal, _Ballot, deaf_to_sigterm


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[torch.device]:
    """A process group of one."""
    has_cuda = torch.cuda.is_available()
    where = f"file://{tmp_path}/store"
    distributed.init_process_group("nccl" if has_cuda else "gloo", init_method=where, rank=0, world_size=1)
    yield torch.device("cuda" if has_cuda else "cpu")
    distributed.destroy_process_group()


def test_a_vote_is_told_with_the_next_one(alone: torch.device) -> None:
    ballot = _Ballot(alone)
    assert [ballot.cast(number) for number in (0, signal.SIGUSR1, 0, 0)] == [0, 0, signal.SIGUSR1, 0]


@pytest.mark.parametrize(
    ("votes", "evaluates", "owed", "stops"),
    [
        ([0], False, False, 0),
        ([SAVE_AGAIN], False, True, 0),
        ([signal.SIGTERM], False, False, signal.SIGTERM),
        ([SAVE_AGAIN, 0], True, True, 0),
        ([SAVE_AGAIN, signal.SIGTERM], True, False, signal.SIGTERM),
        ([0, signal.SIGUSR1], True, False, signal.SIGUSR1),
        ([0, SAVE_AGAIN], True, True, 0),
    ],
)
def test_a_signal_of_any_rank_stops_all_and_a_lost_save_alone_is_owed(
    votes: list[int], evaluates: bool, owed: bool, stops: int
) -> None:
    stop, left = StopOnSignal(), iter(votes)
    stop.ballot = SimpleNamespace(cast=lambda number: next(left))  # type: ignore[assignment]
    control = TrainerControl(should_evaluate=evaluates)
    stop.on_step_end(SimpleNamespace(save_strategy=SaveStrategy.STEPS), None, control)
    assert (stop.owes_a_save, stop.agreed) == (owed, stops)
    assert (control.should_save, control.should_training_stop) == (bool(stops), bool(stops))
    assert list(left) == []


def test_a_rank_that_has_lost_a_save_says_so_once() -> None:
    stop, cast = StopOnSignal(), []
    stop.ballot = SimpleNamespace(cast=lambda number: cast.append(number) or 0)  # type: ignore[assignment]
    stop.has_lost_a_save = True
    for _ in range(2):
        stop.on_step_end(None, None, TrainerControl())
    assert cast == [SAVE_AGAIN, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for(alone: torch.device) -> None:
    ballot = _Ballot(alone)
    ballot.cast(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ballot.cast(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_worker_of_a_data_loader_outlives_sigterm() -> None:
    before, told = signal.getsignal(signal.SIGTERM), []
    try:
        deaf_to_sigterm(told.append, 3)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [3]


def test_the_end_of_the_grace_says_how_to_go_on_without_a_look_at_the_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    stop, ended = StopOnSignal(3.0), list[int]()
    stop.received = signal.SIGTERM
    with monkeypatch.context() as on_a_bad_disk:
        for look in ("scandir", "listdir", "stat"):
            on_a_bad_disk.setattr(os, look, hangs)
        on_a_bad_disk.setattr(os, "_exit", ended.append)
        stop._give_up()
    assert ended == [InterruptedRunError.exit_status]
    said = "stopped by SIGTERM, but not all ranks had saved within --stop_grace 3 seconds. To continue: --resume allow."
    assert said in capsys.readouterr().err


def test_a_signal_while_the_main_thread_begins_another_blocks_nothing_and_the_grace_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, gave_up = StopOnSignal(0.2), threading.Event()
    monkeypatch.setattr(stop, "_give_up", gave_up.set)
    stop.on_train_begin(None, None, None)
    try:
        time.sleep(0.5)
        assert not gave_up.is_set()  # nobody has sent anything
        with threading._active_limbo_lock:  # as inside Thread.start, whose lock is not reentrant
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.received == signal.SIGUSR1
        assert gave_up.wait(20)
    finally:
        for number, handler in stop.handlers.items():
            signal.signal(number, handler)
        stop.end_grace()
