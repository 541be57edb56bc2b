"""Weights that are trained in bf16, without fp32 masters: what rounds away is kept, on disk too, or is lost by name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished, launch
from safetensors.torch import load_file

from finetune.training.resuming import keep_off_triton

optimi = pytest.importorskip("optimi", reason="torch-optimi (extra dev) is not installed")

KAHAN = {"dtype": "bfloat16", "optim": "stable_adamw"}
SHAPE = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=64"
OWN = {
    "max_steps": 6,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "sample_tokens": 0,
    "max_train_samples": 60,
    "max_eval_samples": 4,
}
NOISE = 5e-3  # of a loss: sums are taken in another order, from numbers of eight bits


def train(folder: Path, values: dict[str, Any], ranks: int = 1) -> Finished:
    launcher = "torchrun" if ranks > 1 else "python"
    return launch(launcher, folder, {**OWN, **values}, ranks=ranks, recipe="recipes/causal_lm.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    return train(folder, {"config_overrides": SHAPE, "bf16": False, "per_device_train_batch_size": 8}).folder


@pytest.fixture(scope="module")
def kept(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    values = {**KAHAN, "model_name_or_path": base, "per_device_train_batch_size": 8}
    return train(tmp_path_factory.mktemp("kept") / "run", {**values, "save_strategy": "steps", "save_steps": 3})


def test_weights_and_states_are_in_bf16_and_the_run_says_so(kept: Finished) -> None:
    assert {weight.dtype for weight in load_file(kept.folder / "model.safetensors").values()} == {torch.bfloat16}
    states = torch.load(kept.folder / "checkpoint-6" / "optimizer.pt", weights_only=True)["state"].values()
    assert all(state[name].dtype == torch.bfloat16 for state in states for name in ("exp_avg", "kahan_comp"))
    assert any(state["kahan_comp"].count_nonzero() for state in states)
    assert re.search(r"; bf16[^;]*, its weights and optimizer too;", kept.output)


def test_a_run_goes_on_to_the_last_bit_with_what_was_rounded_away(kept: Finished, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(kept.folder, folder)
    shutil.rmtree(folder / "checkpoint-6")
    values = {**KAHAN, "model_name_or_path": base, "per_device_train_batch_size": 8, "resume": "auto"}
    again = train(folder, {**values, "save_strategy": "steps", "save_steps": 3})
    assert again.column("loss")[-3:] == kept.column("loss")[-3:]
    for name in ("model.safetensors", "checkpoint-6/model.safetensors"):
        assert (again.folder / name).read_bytes() == (kept.folder / name).read_bytes()


def test_a_run_in_fp32_does_not_go_on_in_bf16_nor_the_other_way(kept: Finished, base: Path, tmp_path: Path) -> None:
    """The states of fp32 have no sums of what rounds away, and the optimizer would go on without."""
    values = {**KAHAN, "model_name_or_path": base, "per_device_train_batch_size": 8, "bf16": True, "resume": "auto"}
    done = launch("python", kept.folder, {**OWN, **values, "dtype": "float32", "max_steps": 8, "save_strategy": "steps",
                  "save_steps": 3}, recipe="recipes/causal_lm.py", check=False)  # fmt: skip
    assert done.status == 2
    assert "--dtype was bfloat16 when checkpoint-6 was saved, and is float32" in done.errors[0]


@pytest.mark.nightly
def test_two_ranks_learn_what_one_does(kept: Finished, base: Path, tmp_path: Path) -> None:
    values = {**KAHAN, "model_name_or_path": base, "per_device_train_batch_size": 4}
    two = train(tmp_path / "run", values, ranks=2)
    assert two.column("loss") == pytest.approx(kept.column("loss"), rel=NOISE)


def test_weights_on_a_cpu_are_stepped_by_torchs_own_operators() -> None:
    """Beside torch's CUDA build, torch-optimi would choose Triton."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = optimi.StableAdamW([weight], lr=0.1)
    keep_off_triton(optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.param_groups[0]["triton"] is False
    keep_off_triton(plain := torch.optim.SGD([weight], lr=0.1))
    assert "triton" not in plain.param_groups[0]


def test_small_steps_add_up_where_they_are_kept_and_are_lost_where_they_round_away(base: Path, tmp_path: Path) -> None:
    """A weight of 0.02 in bf16 has its next number 6e-5 away; a step of 1e-5 is less than half of that, and six of
    them are not."""
    values = {"model_name_or_path": base, "per_device_train_batch_size": 8, "learning_rate": 1e-5}
    values |= {"lr_scheduler_type": "constant", "adam_beta1": 0.5, "max_steps": 8}
    before = load_file(base / "model.safetensors")
    moved = {}
    for name, how in (("kept", KAHAN), ("lost", {"dtype": "pure_bfloat16"})):
        after = load_file(train(tmp_path / name, {**values, **how}).folder / "model.safetensors")
        large = {key: one.abs() > 0.016 for key, one in before.items()}
        changed = sum(int((after[key] != one.bfloat16())[large[key]].sum()) for key, one in before.items())
        moved[name] = changed / sum(int(one.sum()) for one in large.values())
    assert moved["lost"] < 0.02
    assert moved["kept"] > 10 * moved["lost"]
