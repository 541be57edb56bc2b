"""What is done about a step that is not finite: weights and optimizer of a checkpoint, within a limit; on any disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from finetune.bench.data import MadeUp, build
from finetune.bench.models import find_model
from finetune.errors import RunError
from finetune.run.flags.guards import GuardArguments
from finetune.training.guards import nan_guard as module
from finetune.training.guards.nan_guard import LIMIT_STEPS, Finding, NanGuard
from finetune.training.loss import settle_loss_scaling
from finetune.training.trainer import FinetuneTrainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FinetuneTrainer:
    """Four steps, with a checkpoint after the second."""
    model = find_model("gptlite", 0.05)
    args = TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("run")),
        max_steps=4,
        save_steps=2,
        save_strategy="steps",
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    built = build(model, 1)
    settle_loss_scaling(built, label_per_token=True)
    guards = GuardArguments(hang_timeout=0, on_nan="rollback", stop_grace=0)
    trainer = FinetuneTrainer(model=built, args=args, train_dataset=MadeUp(model, 16, 1, False), guards=guards)
    trainer.train()
    return trainer


def moments(states: dict[int, dict[str, Any]]) -> list[torch.Tensor]:
    return [torch.as_tensor(value) for state in states.values() for _, value in sorted(state.items())]


def test_weights_and_moments_are_a_checkpoints_again_and_the_schedule_goes_on(trained: FinetuneTrainer) -> None:
    checkpoint = Path(trained.args.output_dir) / "checkpoint-2"
    kept = load_file(checkpoint / "model.safetensors")
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]

    def differences() -> tuple[bool, bool]:
        own = trained.model.state_dict()
        weights = all(torch.equal(own[name], value) for name, value in kept.items())
        now = moments(trained.optimizer.state_dict()["state"])
        return weights, all(torch.equal(a, b) for a, b in zip(now, moments(saved), strict=True))

    assert differences() == (False, False)
    schedule = trained.lr_scheduler.state_dict()
    assert trained.suspect is not None
    trained.suspect.roll_back(checkpoint)
    assert differences() == (True, True)
    assert trained.lr_scheduler.state_dict() == schedule
    assert [group["lr"] for group in trained.optimizer.param_groups] == trained.lr_scheduler.get_last_lr()


def test_a_checkpoint_of_another_layout_is_not_gone_back_to(
    trained: FinetuneTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(trained.args.output_dir)
    guard = trained.nan_guard
    assert guard is not None
    assert guard._newest(folder) == folder / "checkpoint-4"
    (folder / "checkpoint-4/pipeline.json").write_text("{}")
    monkeypatch.setattr(module, "problems", lambda path, hashes: [])
    try:
        assert guard._newest(folder) is None
    finally:
        (folder / "checkpoint-4/pipeline.json").unlink()


def test_a_checkpoint_after_which_the_next_step_fails_too_is_left_for_an_older_one_and_nothing_is_saved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    monkeypatch.setattr(module, "problems", lambda path, hashes: [])
    suspect = Poisoned()
    guard = NanGuard(GuardArguments(on_nan="rollback", nan_limit=9), suspect)
    went: list[str] = []
    suspect.roll_back = lambda folder: went.append(folder.name)
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=6, epoch=0.5, is_world_process_zero=True)
    for _ in range(3):
        control = SimpleNamespace(should_save=True, should_training_stop=False)
        guard.on_step_begin(args, state, control)
        guard.on_optimizer_step(args, state, control)
        guard.on_step_end(args, state, control)
        assert not control.should_save
    assert went == ["checkpoint-6", "checkpoint-4", "checkpoint-2"]
    with pytest.raises(RunError, match="no checkpoint to go back to older than checkpoint-2"):
        guard.on_optimizer_step(args, state, control)


class Poisoned:
    """A suspect whose every step is not finite."""

    sharing = 1

    def __getattr__(self, name: str) -> Any:
        found: dict[str, Any] = {"hit": True, "losses_are_finite": False, "is_scaled": False, "can_load": True}
        look = [Finding(0, 0, None, None)]
        return lambda *given, **named: {**found, "look": look, "batches": [{"x": torch.zeros(2)}]}.get(name)


def hits(steps: list[int], folder: Path, policy: str = "skip", suspect: Any = None) -> None:
    guard = NanGuard(GuardArguments(on_nan=policy, nan_limit=2), suspect or Poisoned())
    for step in steps:
        guard.on_step_begin(None, None, None)
        state = SimpleNamespace(global_step=step, epoch=0.5, is_world_process_zero=True)
        guard.on_optimizer_step(SimpleNamespace(output_dir=str(folder)), state, None)


def test_only_the_steps_of_late_count_for_the_limit(tmp_path: Path) -> None:
    hits([number * LIMIT_STEPS // 2 for number in range(6)], tmp_path)  # two in any thousand
    with pytest.raises(RunError, match="one more than --nan_limit 2 in 1,000 steps"):
        hits([0, 1, 2], tmp_path)


@pytest.mark.parametrize(("policy", "steps"), [("stop", [4]), ("skip", [0, 1, 2])])
def test_what_a_save_under_way_has_met_is_said_beside_why_the_run_ends(
    policy: str, steps: list[int], tmp_path: Path
) -> None:
    class Late(Poisoned):
        def finish_saves(self) -> None:
            raise RunError("checkpoint-7 could not be saved.")

    with pytest.raises(RunError, match=r"the loss is not finite.* checkpoint-7 could not be saved\."):
        hits(steps, tmp_path, policy, Late())


def test_a_batch_that_no_disk_takes_ends_no_run_that_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "_nan").write_text("a file, where the folder should be")
    hits([4], tmp_path)
    said = capsys.readouterr().err
    assert "warning: step 5: the loss is not finite" in said
    assert f"could not be written to {tmp_path}/_nan/step-5 (rank 0: " in said
