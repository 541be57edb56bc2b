"""Checkpoints written while the training goes on: what they hold, and what becomes of a run whose writer fails."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from saved_content import content_of
from transformers import TrainerCallback, TrainingArguments, set_seed

from finetune.errors import RunError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.run.flags import guards
from finetune.run.flags.guards import GuardArguments
from finetune.run.launch import Launch
from finetune.training.checkpoints import beside, copies, obstacles, saves, writer_process, writing
from finetune.training.checkpoints.manifest import Layout, checkpoints_in, problems
from finetune.training.checkpoints.rotation import Keeper
from finetune.training.checkpoints.writing import About, OtherRankError
from finetune.training.run_folder import explained_disk_errors
from finetune.training.trainer import FinetuneTrainer

ROWS = [{"input_ids": [i % 7, 1, 2, 3], "labels": [i % 7, 1, 2, 3]} for i in range(16)]
BEST = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": True}
OF_THE_MOMENT = ("manifest.json", "training_args.bin", "trainer_state.json")  # times, and the folder's name

Does = Callable[[FinetuneTrainer, int], None]


class AtSaves(TrainerCallback):
    """`does` something right after each save."""

    def __init__(self, does: Does) -> None:
        self.does, self.trainer = does, None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.does(self.trainer, state.global_step)


def nothing(trainer: FinetuneTrainer, step: int) -> None:
    pass


def train(
    folder: Path,
    asked: str,
    does: Does = nothing,
    kind: type[FinetuneTrainer] = FinetuneTrainer,
    on_nan: str = "off",
    **more: Any,
) -> FinetuneTrainer:
    set_seed(0)
    shape = {"vocab_size": 16, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=4,
        **{"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **more},
    )  # fmt: skip
    at_saves = AtSaves(does)
    guards = GuardArguments(hang_timeout=0.0, on_nan=on_nan, stop_grace=0.0, async_save=asked)
    model = GPTLiteForCausalLM(GPTLiteConfig(max_position_embeddings=8, **shape))
    trainer = kind(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS, guards=guards, callbacks=[at_saves])
    at_saves.trainer = trainer
    trainer.train()
    return trainer


class Forked:
    """A writer's process that need not import torch, as subprocess.Popen would give it: forked from this one."""

    def __init__(self, command: Sequence[str], env: dict[str, str], pass_fds: Sequence[int]) -> None:
        self.returncode: int | None = None
        if (pid := os.fork()) == 0:
            try:
                sys.argv = ["-c", *command[3:]]
                with suppress(SystemExit):
                    writer_process.main()
            finally:
                os._exit(0)
        self.pid = pid

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about the start of the writer."""
    monkeypatch.setattr(beside, "subprocess", SimpleNamespace(Popen=Forked))


def writer_of(trainer: FinetuneTrainer) -> Any:
    writer = trainer.saves.beside.writer
    assert writer is not None
    return writer


def hold_up(trainer: FinetuneTrainer, seconds: float) -> None:
    """Nothing is written meanwhile."""
    writer = writer_of(trainer)
    os.kill(writer.process.pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (writer.process.pid, signal.SIGCONT)).start()


def test_a_checkpoint_holds_its_step_though_all_changes_before_anything_is_written(tmp_path: Path) -> None:
    class Late(FinetuneTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            os.kill(writer_of(self).process.pid, signal.SIGSTOP)
            super()._save_checkpoint(model, trial)

    def spoil(trainer: FinetuneTrainer, step: int) -> None:
        if step == 4:  # or the second save would be of other weights than the synchronous one
            states = [part for state in trainer.optimizer.state.values() for part in state.values()]
            for tensor in [*trainer.model.parameters(), *states]:
                tensor.data.fill_(7.0)
            assert [path.name for path in checkpoints_in(tmp_path / "beside")] == ["checkpoint-2"]
        os.kill(writer_of(trainer).process.pid, signal.SIGCONT)
        if step == 2:
            trainer.saves.beside.finish()

    train(tmp_path / "sync", "off")
    late = train(tmp_path / "beside", "on", spoil, kind=Late)
    assert float(next(late.model.parameters()).detach().flatten()[0]) == 7.0
    for step in (2, 4):
        folders = [tmp_path / name / f"checkpoint-{step}" for name in ("sync", "beside")]
        one, other = (content_of(folder, without=OF_THE_MOMENT) for folder in folders)
        assert one.keys() == other.keys()
        there = {path.name for path in folders[1].iterdir()}
        assert there >= {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
        assert [name for name in one if one[name] != other[name]] == []
        assert problems(tmp_path / "beside" / f"checkpoint-{step}", hashes=True) == []
    assert sorted(path.name for path in (tmp_path / "beside").iterdir()) == ["checkpoint-2", "checkpoint-4", "latest"]


@pytest.mark.usefixtures("forked")
def test_a_config_that_changes_between_two_saves_is_saved_as_it_is_then(tmp_path: Path) -> None:
    saved: list[Path] = []

    class Counting(FinetuneTrainer):
        def _save_model_files(self, folder: Path, weights: Any) -> None:
            saved.append(folder)
            super()._save_model_files(folder, weights)

    def change(trainer: FinetuneTrainer, step: int) -> None:
        if step == 4:
            trainer.model.config.note = "changed"
        trainer.saves.beside.finish()

    train(tmp_path, "on", change, kind=Counting, max_steps=6)
    notes = [json.loads((path / "config.json").read_text()).get("note") for path in checkpoints_in(tmp_path)]
    assert notes == ["changed", None, None]
    assert [problems(path, hashes=True) for path in checkpoints_in(tmp_path)] == [[], [], []]
    assert len(saved) == 2, "of the second checkpoint the other process writes all files of the model"


@pytest.mark.usefixtures("forked")
def test_what_cannot_be_copied_is_saved_at_once_and_the_run_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Unpicklable(FinetuneTrainer):
        def _save_model_files(self, folder: Path, weights: Any) -> None:
            self.model.config.__class__ = type("Local", (GPTLiteConfig,), {})  # pickle finds no such class
            super()._save_model_files(folder, weights)

    train(tmp_path, "on", kind=Unpicklable, max_steps=6)
    said = capfd.readouterr().out
    assert said.count("note: --async_save: training waits while a save writes the model: its config") == 1
    assert "cannot be pickled" in said
    assert "Define their classes and functions at the top level of a module" in said
    assert [problems(path, hashes=True) for path in checkpoints_in(tmp_path)] == [[], [], []]


@pytest.mark.usefixtures("forked")
def test_what_another_rank_has_to_save_at_once_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def with_another(own: Any) -> list[Any]:
        return [own, ([], "states.pt of rank 1.", 0)] if isinstance(own, tuple) else [own]

    monkeypatch.setattr(saves, "every", with_another)
    train(tmp_path, "on")
    said = capfd.readouterr().out
    assert said.count("training waits while a save writes states.pt of rank 1. This is said once.") == 1
    assert problems(tmp_path / "checkpoint-4", hashes=True) == []


@pytest.mark.usefixtures("forked")
def test_a_writer_that_is_killed_is_told_of_at_the_step_and_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill(trainer: FinetuneTrainer, step: int) -> None:
        if step == 4:
            os.kill(writer_of(trainer).process.pid, signal.SIGSTOP)
            os.kill(writer_of(trainer).process.pid, signal.SIGKILL)
            writer_of(trainer).process.wait()

    with pytest.raises(RunError, match=r"checkpoint-4 could not be saved: .* was killed by SIGKILL"):
        train(tmp_path, "on", kill)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2"]
    assert problems(tmp_path / "checkpoint-2", hashes=True) == []


def test_after_a_lost_save_the_run_saves_again_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def kill(trainer: FinetuneTrainer, step: int) -> None:
        if step == 4:
            os.kill(writer_of(trainer).process.pid, signal.SIGSTOP)
            os.kill(writer_of(trainer).process.pid, signal.SIGKILL)
            writer_of(trainer).process.wait()

    train(tmp_path, "on", kill, max_steps=8, save_steps=4)
    said = "".join(capfd.readouterr())
    assert said.count("warning: rank 0: checkpoint-4 is not saved: the process that writes it was killed by SIGK") == 1
    assert said.count("note: checkpoint-4 could not be saved: the process that writes it was killed by SIGKILL") == 1
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-8", "checkpoint-6"]
    assert [problems(path, hashes=True) for path in checkpoints_in(tmp_path)] == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-8", "latest"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("lost_in", "saved"), [(5, [12, 8, 7]), (6, [12, 8]), (7, [12, 8]), (8, [12, 8])])
def test_a_save_that_is_due_while_ranks_vote_on_a_lost_one_is_the_only_one(
    lost_in: int, saved: list[int], tmp_path: Path
) -> None:
    """The vote is cast in step `lost_in`, as of several ranks told in the next one, and a save is due in step 8."""
    votes = [0]
    told_later: Any = SimpleNamespace(cast=lambda number: votes.append(number) or votes[-2])

    class OneOfSeveral(FinetuneTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.stop.ballot = told_later
            if self.state.global_step == lost_in - 1:
                os.kill(writer_of(self).process.pid, signal.SIGKILL)
                writer_of(self).process.wait()
            return super().training_step(*args, **kwargs)

    def stop(trainer: FinetuneTrainer, step: int) -> None:
        if step == 4:
            os.kill(writer_of(trainer).process.pid, signal.SIGSTOP)

    train(tmp_path, "on", stop, kind=OneOfSeveral, max_steps=12, save_steps=4)
    assert votes.count(1) == 1
    assert [int(path.name.rpartition("-")[2]) for path in checkpoints_in(tmp_path)] == saved


def test_a_writer_that_stands_still_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "PATIENCE_SECONDS", 0.5)
    pids: list[int] = []

    def hold(trainer: FinetuneTrainer, step: int) -> None:
        pids.append(writer_of(trainer).process.pid)
        hold_up(trainer, 1.5)

    train(tmp_path, "on", hold, max_steps=2)
    said = f"rank 0 has waited 0.5 s for checkpoint-2, which process {pids[0]} writes. It is stopped: continue it with"
    assert capfd.readouterr().out.count(said) == 1


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("room", "name"), [(writing, "put_in_place"), (Keeper, "rotate")])
def test_a_checkpoint_whose_writer_is_killed_once_it_has_its_name_is_saved(
    room: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed right after the rename, or right before its report. One checkpoint takes the place of an older one."""
    trainers, own = os.getpid(), getattr(room, name)
    (tmp_path / "checkpoint-4").mkdir()
    best: list[int] = []

    def and_die(*args: Any) -> None:
        own(*args)
        if os.getpid() != trainers:
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(trainer: FinetuneTrainer, step: int) -> None:
        writer_of(trainer).process.wait()
        best.append(trainer.state.best_global_step)

    monkeypatch.setattr(room, name, and_die)
    train(tmp_path, "on", finish, max_steps=8, save_total_limit=2, **BEST)
    said = "".join(capfd.readouterr())
    assert "is not saved" not in said
    assert "could not be saved" not in said
    assert best == [2, 2, 2, 2], "the best is not forgotten"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-2", "checkpoint-6", "checkpoint-8", "latest",
    ]  # fmt: skip
    assert (tmp_path / "latest").read_text() == "checkpoint-8\n"
    assert [problems(path, hashes=True) for path in checkpoints_in(tmp_path)] == [[], [], []]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["left", "none", "in place", "of another"])
def test_a_part_whose_writer_is_killed_before_it_reports_counts_if_it_is_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another rank than the one that commits."""
    own = writer_process._tell

    def and_die(*args: Any) -> None:
        if place != "none":
            own(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(writer_process, "_tell", and_die)
    checkpoint = tmp_path / "checkpoint-2"
    folder = writing.folder_of(checkpoint)
    folder.mkdir(parents=True)
    writer = beside.Writer()
    writer.begin(checkpoint)
    writer.hand_over(writer_process.Job(checkpoint, About(2, None, 8, Layout("ddp", 2)), 1, 2, {}, ()))
    writer.go()
    writer.process.wait()
    if place == "in place":
        folder.rename(checkpoint)
    elif place == "of another":
        checkpoint.mkdir()
    if place in ("in place", "of another"):
        shutil.rmtree(folder.parent)
    lost = place in ("none", "of another")
    with pytest.raises(OtherRankError, match="was killed by SIGKILL") if lost else nullcontext():
        assert not writer.wait(whole=False).is_whole
    writer.close()


def test_a_writer_that_still_imports_is_deaf_to_the_signals_that_its_group_gets() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    writer = beside.Writer()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked, "its rank heeds them"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(writer.process.pid, number)
    with pytest.raises(subprocess.TimeoutExpired):
        writer.process.wait(1)
    writer.close()


@pytest.mark.usefixtures("forked")
def test_a_writer_that_is_killed_between_two_saves_is_replaced(tmp_path: Path) -> None:
    pids: list[int] = []

    def kill(trainer: FinetuneTrainer, step: int) -> None:
        pids.append(writer_of(trainer).process.pid)
        if step == 4:
            while not writer_of(trainer).is_done():
                time.sleep(0.01)
            os.kill(pids[-1], signal.SIGKILL)
            writer_of(trainer).process.wait()

    train(tmp_path, "on", kill, max_steps=8)
    assert len(set(pids)) == 2
    assert [path.name for path in checkpoints_in(tmp_path)] == [f"checkpoint-{step}" for step in (8, 6, 4, 2)]
    assert [problems(path, hashes=True) for path in checkpoints_in(tmp_path)] == [[]] * 4


def test_where_no_process_can_be_started_saves_are_synchronous_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(name: str) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "memfd_create", refused)
    train(tmp_path, "on", max_steps=2)
    said = capfd.readouterr().out
    assert "saves stay synchronous, because the process that writes them cannot be started ([Errno 13] " in said
    assert "while training continues (--async_save" not in said
    assert problems(tmp_path / "checkpoint-2", hashes=True) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("values", "kept"),
    [
        pytest.param({"save_only_model": True}, [6, 4, 2], id="weights alone"),
        pytest.param({"save_steps": 1, "save_total_limit": 1}, [6], id="one at each step"),
        pytest.param({**BEST, "save_total_limit": 1, "load_best_model_at_end": True}, [6, 2], id="the best is older"),
        pytest.param({**BEST, "save_strategy": "best"}, [2], id="only the best"),
        pytest.param({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}, [8, 4], id="each epoch"),
    ],
)
def test_the_same_checkpoints_are_kept_as_by_synchronous_saves(
    values: dict[str, Any], kept: list[int], tmp_path: Path
) -> None:
    """In a folder with an odd name, reached through a link."""
    (tmp_path / "zwei Wörter").mkdir()
    (tmp_path / "beside").symlink_to("zwei Wörter")
    for asked in ("off", "on"):
        train(tmp_path / ("beside" if asked == "on" else "sync"), asked, **{"max_steps": 6, **values})
    for step in kept:
        one, other = (tmp_path / name / f"checkpoint-{step}" for name in ("sync", "beside"))
        assert content_of(one, without=OF_THE_MOMENT) == content_of(other, without=OF_THE_MOMENT)
        assert problems(other, hashes=True) == []
    for name in ("sync", "beside"):
        assert [int(path.name.rpartition("-")[2]) for path in checkpoints_in(tmp_path / name)] == kept, name


@pytest.mark.usefixtures("forked")
def test_a_disk_that_fills_up_under_the_writer_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here: that takes root")

    class HeldUp(FinetuneTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.saves.beside.finish()
            os.kill(writer_of(self).process.pid, signal.SIGSTOP)
            super()._save_checkpoint(model, trial)

    def fill(trainer: FinetuneTrainer, step: int) -> None:
        if step == 4:
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 2**15))
        os.kill(writer_of(trainer).process.pid, signal.SIGCONT)

    try:
        with pytest.raises(RunError, match=r"the disk of .* is full"), explained_disk_errors(disk):
            train(disk, "on", fill, kind=HeldUp)
        assert [path.name for path in checkpoints_in(disk)] == ["checkpoint-2"]
        assert problems(disk / "checkpoint-2", hashes=True) == []
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.usefixtures("forked")
def test_a_disk_that_takes_no_more_ends_the_run_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(trainer: FinetuneTrainer, step: int) -> None:
        if step == 2:
            trainer.saves.beside.finish()
            resource.prlimit(writer_of(trainer).process.pid, resource.RLIMIT_FSIZE, (1000, 1000))

    with pytest.raises(RunError, match="checkpoint-4 could not be saved"):
        train(tmp_path, "on", fill)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2"]
    assert problems(tmp_path / "checkpoint-2", hashes=True) == []


@pytest.mark.usefixtures("forked")
def test_a_run_that_the_nan_guard_ends_has_the_checkpoint_that_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "ENDING_SECONDS", 0.0)

    def spoil(trainer: FinetuneTrainer, step: int) -> None:
        next(trainer.model.parameters()).data.fill_(math.nan)
        hold_up(trainer, 1.0)

    with pytest.raises(RunError, match="step 3 is not finite"):
        train(tmp_path, "on", spoil, on_nan="stop")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2"]
    assert problems(tmp_path / "checkpoint-2", hashes=True) == []


def no_waiting(seconds: float) -> None:
    raise AssertionError("it waits for a checkpoint that nobody writes")


@pytest.mark.usefixtures("forked")
def test_a_save_that_fails_before_it_is_handed_over_everywhere_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = beside.Writer.hand_over

    def failing_elsewhere(writer: beside.Writer, job: Any) -> None:
        own(writer, job)
        raise OSError("of another rank")

    monkeypatch.setattr(beside.Writer, "hand_over", failing_elsewhere)
    monkeypatch.setattr(beside, "time", SimpleNamespace(monotonic=time.monotonic, sleep=no_waiting))
    with pytest.raises(RunError, match="checkpoint-2 could not be saved: of another rank"):
        train(tmp_path, "on")
    assert checkpoints_in(tmp_path) == []


@pytest.mark.usefixtures("forked")
def test_one_that_is_interrupted_before_it_is_sent_does_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(connection: Any, message: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "send", interrupted)
    monkeypatch.setattr(beside, "time", SimpleNamespace(monotonic=time.monotonic, sleep=no_waiting))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "on")
    assert checkpoints_in(tmp_path) == []


@pytest.mark.nightly
def test_so_has_one_that_fails_however_long_its_own_part_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "ENDING_SECONDS", 4.0)

    def fail(trainer: FinetuneTrainer, step: int) -> None:
        hold_up(trainer, 6.0)
        raise ValueError("of a callback")

    with pytest.raises(ValueError, match="of a callback"):
        train(tmp_path, "on", fail)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2"]
    assert problems(tmp_path / "checkpoint-2", hashes=True) == []


@pytest.mark.nightly
def test_a_save_that_is_due_waits_and_the_last_whole_checkpoint_stays_meanwhile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there: list[list[str]] = []

    def stop_for_a_while(trainer: FinetuneTrainer, step: int) -> None:
        there.append([path.name for path in checkpoints_in(tmp_path)])
        hold_up(trainer, 1.5)

    train(tmp_path, "on", stop_for_a_while, save_total_limit=1)
    assert there == [[], ["checkpoint-2"]], "the first while it was written, and after it"
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-4"]
    assert re.findall(r"note: (\S+) waited [0-9.]+ s for (\S+) to be written", capfd.readouterr().out) == [
        ("checkpoint-4", "checkpoint-2")
    ]


@pytest.mark.usefixtures("forked")
def test_a_short_wait_for_the_save_before_is_not_worth_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def note(trainer: FinetuneTrainer, step: int) -> None:
        waits.append(not writer_of(trainer).is_done())
        hold_up(trainer, 0.1)

    waits: list[bool] = []
    train(tmp_path, "on", note, save_steps=1)
    assert any(waits)
    assert "waited" not in capfd.readouterr().out


@pytest.mark.nightly
def test_auto_is_for_checkpoints_that_are_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for worth in (2**40, 0):
        monkeypatch.setattr(guards, "WORTH_BYTES", worth)
        train(tmp_path / str(worth), "auto")
        said.append("while training continues (--async_save auto)" in capfd.readouterr().out)
    assert said == [False, True]


def test_auto_leaves_gpus_and_several_hosts_alone_and_a_run_on_cpus_is_asked_whether_it_has_the_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saves, "obstacle", lambda of, copied: f"{copied} bytes are too many")
    for asked, device, hosts in (
        ("auto", "cuda", 1), ("off", "cpu", 1), ("on", "cuda", 1), ("auto", "cpu", 2), ("auto", "cpu", 1)
    ):  # fmt: skip
        monkeypatch.setattr(saves, "read_launch", lambda hosts=hosts: Launch(world_size=hosts))
        trainer = SimpleNamespace(args=SimpleNamespace(device=SimpleNamespace(type=device)))
        saved = SimpleNamespace(copied_bytes=lambda size: size, obstacle=lambda: None)
        of = SimpleNamespace(trainer=trainer, saved=saved, expected_bytes=lambda: 2**40)
        saves.SavesBeside(of).choose(asked)
    said = capfd.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in said] == [" --async_save on", " --async_save auto"]


@pytest.mark.usefixtures("forked")
def test_a_save_for_whose_copies_memory_lacks_is_synchronous_and_those_that_need_no_more_do_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run has taken memory since it started, and then other processes do. The first copy is of the states alone."""
    monkeypatch.setattr(copies, "SEGMENT_BYTES", 2**16)
    plenty, little = 2**40, 1000
    left = [plenty, little, plenty, little, little, plenty, plenty, plenty]  # at the start, and before saves 1 to 7
    beside_training: list[bool] = []

    def note(trainer: FinetuneTrainer, step: int) -> None:
        beside_training.append(trainer.saves.beside.place is not None)

    monkeypatch.setattr(obstacles, "free_memory", lambda: left.pop(0))
    train(tmp_path, "on", note, max_steps=18)
    assert beside_training == [False, True, False, False, True, True, True, True, True]
    assert left == [], "once a save has taken no more, later ones do not look"
    said = capfd.readouterr().out
    assert "checkpoints are written while training continues" in said
    assert said.count("note: checkpoint-2 is saved synchronously, because the copies take about") == 1
    assert said.count("synchronously") == 1
    assert [problems(path, hashes=True) for path in checkpoints_in(tmp_path)] == [[]] * 9


@pytest.mark.parametrize(("limit", "share"), [("RLIMIT_FSIZE", 0.5), ("RLIMIT_AS", 1.0)])
def test_limits_of_the_shell_count_as_a_lack_of_memory(
    limit: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, used = 2**20, int(psutil.Process().memory_info().vms)
    limits = {getattr(resource, limit): int(share * needed) + used * (limit == "RLIMIT_AS")}
    assert obstacles.lacking(needed) is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, resource.RLIM_INFINITY),) * 2)
    assert str(obstacles.lacking(needed)).startswith("the copies take about 1 MiB")


@pytest.mark.nightly
def test_where_memory_lacks_each_save_is_finished_at_once_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(obstacles, "free_memory", lambda: 1000)
    train(tmp_path, "on")
    said = capfd.readouterr().out
    assert "note: --async_save on: saves stay synchronous, because the copies take about" in said
    assert problems(tmp_path / "checkpoint-4", hashes=True) == []


@pytest.mark.nightly
def test_nothing_is_left_of_process_and_memory(tmp_path: Path) -> None:
    pids: list[int] = []
    before = len(os.listdir("/proc/self/fd"))
    trainer = train(tmp_path, "on", lambda trainer, step: pids.append(writer_of(trainer).process.pid))
    assert trainer.saves.beside.writer is None
    assert not Path(f"/proc/{pids[0]}").exists()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
