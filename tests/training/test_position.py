"""What a supervised rank tells of where it is, and what it makes of what earlier attempts told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from finetune.data.sampling import GlobalBatchSampler
from finetune.errors import RequestError, RunError, UnevenBatchError
from finetune.run import supervised
from finetune.run.supervised import batch_at_first_start, tell, tell_end, told
from finetune.training.position import Position, follow

BATCH = 8


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a second attempt, of which this process is a rank."""
    folder = tmp_path / "_supervise" / "attempt-2"
    folder.mkdir(parents=True)
    monkeypatch.setenv(supervised.ENVIRONMENT, str(folder))
    return folder


def a_trainer(samples: int | None = 20) -> Any:
    sampler = None if samples is None else GlobalBatchSampler(samples, BATCH, seed=3)
    handler = SimpleNamespace(added=[])
    handler.add_callback = handler.added.append
    args = SimpleNamespace(gradient_accumulation_steps=2)
    return SimpleNamespace(sampler=sampler, global_batch_size=BATCH, callback_handler=handler, args=args)


def position(attempt: Path) -> Any:
    return json.loads((attempt / "position-0").read_text())


def test_nothing_is_kept_of_a_run_that_nobody_supervises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(supervised.ENVIRONMENT, raising=False)
    trainer = a_trainer()
    follow(trainer)
    assert trainer.callback_handler.added == []
    assert batch_at_first_start() is None
    tell_end(1, RunError("a full disk"))


def test_the_position_is_that_of_each_moment(attempt: Path) -> None:
    trainer = a_trainer()
    follow(trainer)
    (callback,) = trainer.callback_handler.added
    state, control = TrainerState(global_step=10_000), TrainerControl()
    callback.on_train_begin(None, state, control)
    assert position(attempt) == {"reading": 10_001}
    callback.on_step_begin(None, state, control)
    assert position(attempt) == {"step": 10_001}
    state.global_step = 9  # shorter than before: nothing of it may be left
    callback.on_step_end(None, state, control)
    assert position(attempt) == {"reading": 10}
    control.should_save = True
    callback.on_step_end(None, state, control)
    assert position(attempt) == {"after": 9}
    callback.on_save(None, state, control)
    assert position(attempt) == {"reading": 10}
    callback.on_train_end(None, state, control)
    assert position(attempt) == {"after": 9}


@pytest.mark.parametrize(("step", "epoch", "place"), [(2, 0, 1), (4, 1, 0), (6, 1, 2)])
def test_the_samples_of_a_step_that_has_failed_are_written(step: int, epoch: int, place: int, attempt: Path) -> None:
    (attempt / supervised.FAILED_AT).write_text(str(step))
    trainer = a_trainer()  # three steps an epoch
    callback = Position(trainer, attempt)
    trainer.sampler.set_epoch(7)  # wherever that stands
    callback.on_train_begin(None, TrainerState(global_step=step - 2), TrainerControl())
    assert not (attempt / supervised.SAMPLES).exists()
    callback.on_step_end(None, TrainerState(global_step=step - 1), TrainerControl())
    order = GlobalBatchSampler(20, BATCH, seed=3)
    order.set_epoch(epoch)
    rows = list(order)[place * BATCH :]
    written = json.loads((attempt / supervised.SAMPLES).read_text())
    assert written == {"step": rows[:BATCH], "ahead": rows[BATCH : BATCH + BATCH // 2]}
    assert (written["ahead"] == []) == (place == 2)
    assert trainer.sampler.epoch == 7


@pytest.mark.parametrize("text", ["²", "", "no number"])
def test_a_step_that_cannot_be_read_ends_no_run(text: str, attempt: Path) -> None:
    (attempt / supervised.FAILED_AT).write_text(text)
    Position(a_trainer(), attempt).on_train_begin(None, TrainerState(), TrainerControl())
    assert not (attempt / supervised.SAMPLES).exists()


def test_samples_that_cannot_be_named_end_no_run(attempt: Path) -> None:
    (attempt / supervised.FAILED_AT).write_text("1")
    trainer = a_trainer()
    trainer.args.gradient_accumulation_steps = 0  # whatever may be wrong
    Position(trainer, attempt).on_train_begin(None, TrainerState(), TrainerControl())
    assert position(attempt) == {"reading": 1}


def test_of_a_stream_no_samples_are_known(attempt: Path) -> None:
    (attempt / supervised.FAILED_AT).write_text("1")
    Position(a_trainer(None), attempt).on_train_begin(None, TrainerState(), TrainerControl())
    assert json.loads((attempt / supervised.SAMPLES).read_text()) == {}


def test_the_first_start_tells_the_global_batch_to_the_next(attempt: Path) -> None:
    assert batch_at_first_start() is None
    Position(a_trainer(), attempt).on_train_begin(None, TrainerState(), TrainerControl())
    assert batch_at_first_start() == BATCH
    tell(attempt.parent, "training", "of another batch", global_batch_size=99)
    assert batch_at_first_start() == BATCH


def test_a_command_with_other_flags_begins_anew(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may have run out of memory."""
    for digest in ("large", "small"):
        for name, value in supervised.environment_of(attempt, digest).items():
            monkeypatch.setenv(name, value)
        assert batch_at_first_start() is None
        Position(a_trainer(), attempt).on_train_begin(None, TrainerState(), TrainerControl())
        assert batch_at_first_start() == BATCH
    tell(attempt.parent, "training", "with another batch", global_batch_size=99, command="else")
    assert [supervised.has_begun_with(batch) for batch in (BATCH, 99, 4)] == [True, True, False]


def test_a_start_tells_how_long_training_stood_still(attempt: Path) -> None:
    for event in ("attempt failed", "training", "rank ended", "attempt failed"):
        tell(attempt.parent, event, "it failed", attempt=1)
    log = attempt.parent / supervised.LOG
    records = [
        {**one, "time": one["time"] - back} for one, back in zip(told(attempt.parent), (99, 98, 30, 9), strict=True)
    ]
    log.write_text("".join(json.dumps(one) + "\n" for one in records))
    Position(a_trainer(), attempt).on_train_begin(None, TrainerState(global_step=40), TrainerControl())
    record = told(attempt.parent)[-1]
    assert 30 <= record["seconds"] < 60  # since the first word of it, after the last start
    assert (record["attempt"], record["ranks"], record["hosts"], record["step"]) == (2, 1, 1, 40)
    assert "training on 1 rank(s) of 1 host(s) from step 40, global batch 8, 3" in record["said"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RunError("the disk is full.\nAnd more."), 1, "rank 0 ended with status 1: the disk is full."),
        (RequestError("--x is wrong"), 2, "rank 0 ended with status 2: --x is wrong"),
        (None, 0, "rank 0 finished"),
    ],
)
def test_a_rank_tells_how_it_ends(error: Exception | None, status: int, said: str, attempt: Path) -> None:
    tell_end(status, error)
    (record,) = told(attempt.parent)
    assert (record["event"], record["status"], record["attempt"]) == ("rank ended", status, 2)
    assert record["said"] == said
    assert "most_hosts" not in record


def test_a_batch_that_does_not_divide_is_told_with_the_hosts_that_could_share_it(attempt: Path) -> None:
    tell_end(2, UnevenBatchError("it does not divide", 2))
    assert told(attempt.parent)[0]["most_hosts"] == 2


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(supervised.ENVIRONMENT, str(tmp_path / "gone" / "attempt-1"))
    tell_end(1, RunError("x"))
    Position(a_trainer(), tmp_path / "gone" / "attempt-1").on_train_begin(None, TrainerState(), TrainerControl())
