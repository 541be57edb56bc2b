"""Gradient compression by the recipes themselves: trained, counted, cut off, resumed, and as good as without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished, launch
from safetensors.torch import load_file

CAUSAL = "recipes/causal_lm.py"
STEPS, START, SAVED = 8, 3, 5
SMALL = {
    "config_overrides": "num_hidden_layers=2,hidden_size=64,num_attention_heads=2,max_position_embeddings=64",
    "max_steps": STEPS,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": SAVED,
    "bf16": False,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "sample_tokens": 1,
    "max_train_samples": 200,
    "comm_hook_start_steps": START,
}


def train(folder: Path, **values: Any) -> Finished:
    return launch("torchrun", folder, {**SMALL, **values}, ranks=2, recipe=CAUSAL)


@pytest.mark.parametrize("hook", ["onebit_adam", "powersgd"])
def test_a_run_that_was_cut_off_goes_on_as_if_it_never_was(hook: str, tmp_path: Path) -> None:
    uncut = train(tmp_path / "uncut", ddp_comm_hook=hook)
    assert f"gradients: uncompressed until step {START}, then" in uncut.output
    assert f"(--ddp_comm_hook {hook})" in uncut.output
    shares = uncut.column("comm_share_of_fp32")
    assert shares[:START] == pytest.approx([1.0] * START)
    assert max(shares[START:]) < 0.25
    results = uncut.json("train_results.json")
    assert results["comm_compressed_share_of_fp32"] == pytest.approx(shares[-1])
    assert results["comm_share_of_fp32"] == pytest.approx(sum(shares) / STEPS)
    if hook == "onebit_adam":
        assert max(shares[START:]) <= 1 / 20
    folder = tmp_path / "cut"
    shutil.copytree(tmp_path / "uncut" / f"checkpoint-{SAVED}", folder / f"checkpoint-{SAVED}")
    cut = train(folder, ddp_comm_hook=hook, resume="auto")
    assert "has no compression errors of" not in cut.output
    assert cut.column("loss")[-(STEPS - SAVED) :] == pytest.approx(uncut.column("loss")[SAVED:], rel=1e-6)
    found, wanted = (load_file(run.folder / "model.safetensors") for run in (cut, uncut))
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-6), name


@pytest.mark.nightly
def test_errors_of_another_number_of_ranks_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    values = {**SMALL, "ddp_comm_hook": "onebit_adam", "per_device_train_batch_size": 6}
    launch("torchrun", tmp_path / "run", values, ranks=2, recipe=CAUSAL)
    (tmp_path / "run" / "README.md").unlink()
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{STEPS}", ignore_errors=True)
    values |= {"per_device_train_batch_size": 4, "resume": "auto"}
    other = launch("torchrun", tmp_path / "run", values, ranks=3, recipe=CAUSAL)
    assert "has no compression errors of --ddp_comm_hook onebit_adam on 3 ranks: what earlier steps" in other.output
    assert max(other.column("comm_share_of_fp32")[-(STEPS - SAVED) :]) <= 1 / 20


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        (CAUSAL, {"max_steps": 300, "per_device_train_batch_size": 8, "sample_tokens": 1}),
        ("recipes/seq_cls.py", {"max_steps": 250}),
    ],
    ids=["GPT-lite", "classifier"],
)
def test_onebit_adam_ends_at_the_loss_of_adam(recipe: str, values: dict[str, Any], tmp_path: Path) -> None:
    common = {**values, "bf16": False, "save_strategy": "no", "eval_strategy": "no"}
    losses = {}
    for hook in ("none", "onebit_adam"):
        run = launch("torchrun", tmp_path / hook, {**common, "ddp_comm_hook": hook}, ranks=2, recipe=recipe)
        losses[hook] = run.json("eval_results.json")["eval_loss"]
    assert losses["onebit_adam"] <= 1.01 * losses["none"], losses


@pytest.mark.parametrize(
    ("launcher", "ranks", "said"),
    [("python", 1, "a single process sends no gradients"), ("deepspeed", 2, r"Add --deepspeed none, or drop the hook")],
)
def test_where_nothing_can_be_compressed_the_run_does_not_start(
    launcher: str, ranks: int, said: str, tmp_path: Path
) -> None:
    run = launch(launcher, tmp_path / "run", {"ddp_comm_hook": "onebit_adam"}, ranks=ranks, check=False)
    (error,) = run.errors
    assert run.status == 2
    assert said in error
    assert not run.folder.exists()
