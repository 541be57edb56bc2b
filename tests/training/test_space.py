"""Is there room for a checkpoint? What is expected is what is then written."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from finetune.errors import RunError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.training.checkpoints.manifest import read_manifest
from finetune.training.checkpoints.space import check_space, copied_bytes, stage_bytes, states_bytes, trainer_bytes
from finetune.training.checkpoints.trainer_adapter import TrainerSaved
from finetune.training.trainer import FinetuneTrainer

CONFIG = GPTLiteConfig(vocab_size=2000, num_hidden_layers=2, hidden_size=256, num_attention_heads=4)


@pytest.mark.parametrize(
    "values",
    [{}, {"optim": "sgd"}, {"optim": "adafactor"}, {"save_only_model": True}],
    ids=lambda values: " ".join(map(str, values.values())) or "adamw_torch",
)
def test_what_is_expected_is_written(values: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.ones(8, dtype=torch.long)}] * 4
    common = {"max_steps": 1, "save_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, **common, **values)
    trainer = FinetuneTrainer(model=GPTLiteForCausalLM(CONFIG), args=args, train_dataset=rows)
    expected = trainer_bytes(trainer, None)
    trainer.train()
    written = read_manifest(tmp_path / "checkpoint-1").bytes
    assert written <= expected <= 1.05 * written + 2**20, "what is asked for is enough, and little more"
    assert trainer.saves.saved_bytes == read_manifest(tmp_path / "checkpoint-1").bytes


def stand_in(trained: int, frozen: int, fsdp: bool = False, peft: bool = False, **values: Any) -> Any:
    parameters = [torch.nn.Parameter(torch.empty(trained, device="meta"))]
    parameters += [torch.nn.Parameter(torch.empty(frozen, device="meta"), requires_grad=False)]
    model = SimpleNamespace(parameters=lambda: iter(parameters), **({"peft_config": {}} if peft else {}))
    args = SimpleNamespace(optim="adamw_torch", optim_args=None, save_only_model=False, **values)
    return SimpleNamespace(model=model, args=args, is_fsdp_enabled=fsdp)


def engine_of(stage: int, saves: bool = True, **values: Any) -> TrainerSaved:
    """Of a trainer after a step, whose model has a trained and a frozen weight."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 7, bias=False))
    model[0].weight.requires_grad = False
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(20))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(20)
    optimizer.step()
    zero = {"zero_optimization": {"stage": stage}}
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=zero))
    args = SimpleNamespace(**{"world_size": 2, "should_save": saves, "save_only_model": False, **values})
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    accelerator = SimpleNamespace(state=state)
    return TrainerSaved(
        SimpleNamespace(model=model, args=args, optimizer=wrapped, accelerator=accelerator, is_deepspeed_enabled=True)
    )


@pytest.mark.parametrize(
    ("saved", "sizes"),
    [
        pytest.param(engine_of(2), [35, 20, 1, 20, 20], id="the weights that are trained, and this rank's states"),
        pytest.param(engine_of(1, saves=False), [20, 1, 20, 20], id="another rank writes the weights"),
        pytest.param(engine_of(2, save_only_model=True), [], id="no states"),
        pytest.param(engine_of(3), [], id="ZeRO-3 gathers weights first"),
    ],
)
def test_what_every_save_copies_is_copied_ahead(saved: TrainerSaved, sizes: list[int]) -> None:
    assert [tensor.numel() for tensor in saved.ahead()] == sizes


@pytest.mark.parametrize(
    ("trainer", "zero_stage", "bytes_of_each"),
    [
        pytest.param(stand_in(10**9, 0), None, 4 + 8, id="DDP"),
        pytest.param(stand_in(10**9, 0), 2, 4 + 4 + 4 + 8, id="ZeRO-2: weights twice, and an fp32 copy"),
        pytest.param(stand_in(10**9, 0), 3, 4 + 4 + 8, id="ZeRO-3"),
        pytest.param(stand_in(10**9, 0, fsdp=True), None, 4 + 4 + 8, id="FSDP"),
        pytest.param(stand_in(10**9, 10**12, peft=True), None, 4 + 8, id="adapters alone"),
    ],
)
def test_each_layout_writes_what_it_has(trainer: Any, zero_stage: int | None, bytes_of_each: int) -> None:
    assert trainer_bytes(trainer, zero_stage) == pytest.approx(bytes_of_each * 10**9, rel=0.03)


@pytest.mark.parametrize(
    ("values", "zero_stage", "hosts", "bytes_of_each"),
    [
        pytest.param({}, None, 1, 4 + 8, id="DDP"),
        pytest.param({}, None, 2, 4 + 8, id="DDP: rank 0 copies all"),
        pytest.param({}, 0, 2, 4 + 4 + 8, id="ZeRO-0 on two hosts: rank 0 copies all"),
        pytest.param({}, 1, 2, 4 + (4 + 8) / 2, id="ZeRO-1 on two hosts: half of the states"),
        pytest.param({}, 2, 1, 4 + 4 + 8, id="ZeRO-2: weights once, though two files need them"),
        pytest.param({}, 3, 1, 4 + 4 + 8, id="ZeRO-3"),
        pytest.param({}, 2, 2, 4 + (4 + 8) / 2, id="ZeRO-2 on two hosts: half of the states"),
        pytest.param({"fsdp": True}, None, 1, 4, id="FSDP: weights alone"),
    ],
)
def test_each_layout_copies_what_it_does_not_write_at_once(
    values: dict[str, Any], zero_stage: int | None, hosts: int, bytes_of_each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    trainer = stand_in(10**9, 0, world_size=4 * hosts, **values)
    found = copied_bytes(trainer, trainer_bytes(trainer, zero_stage), zero_stage)
    assert found == pytest.approx(bytes_of_each * 10**9, rel=0.04)


def test_a_stage_of_a_pipeline_writes_fp32_weights_and_states() -> None:
    def each(optim: str, has_momentum: bool, weights_only: bool) -> float:
        return stage_bytes([10**8, 10**8], optim, has_momentum, weights_only) / (2 * 10**8)

    assert each("AdamW", False, weights_only=False) == pytest.approx(12, rel=0.03)
    assert each("AdamW", False, weights_only=True) == pytest.approx(4, rel=0.03)
    assert each("SGD", True, weights_only=False) == pytest.approx(8, rel=0.03)


def test_optimizers_keep_what_they_keep() -> None:
    names = "adamw_torch sgd adafactor adamw_bnb_8bit paged_lion_8bit rmsprop FusedAdam".split()
    assert [states_bytes(name) for name in names] == [8, 0, 0, 2, 2, 4, 8]
    assert states_bytes("sgd", has_momentum=True) == 4


def test_too_little_room_is_said_with_both_numbers_and_the_mends(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path / "not" / "there" / "yet", 1, "step 4")
    with pytest.raises(RunError) as error:
        check_space(tmp_path / "run", free + 100 * 2**30, "step 4")
    said = str(error.value)
    assert said.startswith(f"step 4: a checkpoint needs about {(free + 100 * 2**30) / 2**20:,.0f}"[:45])
    for mend in ("--save_total_limit", "--save_only_model", "--output_dir", "; then --resume allow."):
        assert mend in said


@pytest.mark.parametrize(("free", "fits"), [(1000, True), (999, False), (500, False), (0, False)])
def test_a_checkpoint_wants_all_of_its_bytes(
    free: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=4000, used=4000 - free, free=free))
    with nullcontext() if fits else pytest.raises(RunError, match="step 4: a checkpoint needs about"):
        check_space(tmp_path, 1000, "step 4")


def test_a_disk_that_does_not_say_its_size_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=0))
    check_space(tmp_path, 2**40, "step 4")
    check_space(tmp_path, 2**40, "step 8")
    assert capsys.readouterr().out.count("does not report its free space") == 1
