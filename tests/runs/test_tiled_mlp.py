"""A tiled MLP trains with the loss, the gradients and the norm of the whole one, also in a pipeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, Finished, gate_has, launch
from exact_runs import GLOBAL_BATCH, ONE_A_BLOCK, PACKED, RECIPE, SHORT

sys.path.append(str(REPO / "tests/generation"))
from tiny_models import saved

pytestmark = pytest.mark.usefixtures("built_ops")
TILES = {"tiled_mlp_num_shards": 5}  # which divides neither a block nor a batch
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "down_proj"]}
CASES = [
    ("zero3", 2, PACKED, {"activation_checkpointing": True, "gradient_accumulation_steps": 2}),
    ("zero0", 2, PACKED, {}),
    ("zero1", 2, ONE_A_BLOCK, {"gradient_accumulation_steps": 2}),
    ("zero2", 2, PACKED, {"gradient_accumulation_steps": 2}),
    ("zero2", 1, PACKED, {"activation_checkpointing": True}),
    ("zero3", 2, PACKED, {"sequence_parallel_size": 2}),
    ("zero3_offload", 2, PACKED, {}),
    ("zero2_offload", 2, PACKED, {"gradient_accumulation_steps": 2}),
    ("zero2", 2, PACKED, LORA),
    ("zero3", 2, PACKED, {**LORA, "activation_checkpointing": True}),
]


@pytest.mark.parametrize(("config", "ranks", "rows", "values"), gate_has(CASES[:1], CASES))
def test_loss_and_norm_are_those_of_whole_mlps(
    config: str, ranks: int, rows: Any, values: dict[str, Any], tmp_path: Path
) -> None:
    text = "the cat sat on a mat and saw two birds in tall grass"
    lines = [json.dumps({"prompt": text[:n], "completion": text[n:]}) for n in range(10, 40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    saved(tmp_path / "llama", "llama")
    micro = GLOBAL_BATCH * values.get("sequence_parallel_size", 1) // ranks
    micro //= values.get("gradient_accumulation_steps", 1)
    found = []
    for name, tiles in (("whole", {}), ("tiled", TILES)):
        every = {**SHORT, "train_file": tmp_path / "rows.jsonl", "model_name_or_path": tmp_path / "llama",
                 "deepspeed": config, **rows, **values, "per_device_train_batch_size": micro, **tiles}  # fmt: skip
        found.append(launch("torchrun", tmp_path / name, every, ranks=ranks, recipe=RECIPE))
    whole, tiled = found
    assert_same(tiled, whole)


def assert_same(tiled: Finished, whole: Finished) -> None:
    assert len(whole.steps) == SHORT["max_steps"]
    assert tiled.column("loss") == pytest.approx(whole.column("loss"), rel=1e-6)
    assert tiled.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=2e-6)
    assert min(whole.column("grad_norm")) > 0


STAGED = {**SHORT, "pipeline_parallel_size": 2, "gradient_accumulation_steps": 2, "max_train_samples": 40}
STAGED |= {"config_overrides": "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,max_position_embeddings=64"}


@pytest.mark.parametrize(
    ("ranks", "values"), gate_has([(2, {})], [(2, {}), (2, {"activation_checkpoint_interval": 1}), (4, PACKED)])
)
def test_so_does_a_pipelines(ranks: int, values: dict[str, Any], tmp_path: Path) -> None:
    """Four ranks are two pipelines, which reduce gradients."""
    every = {**STAGED, "schedule_step": 0, "per_device_train_batch_size": GLOBAL_BATCH // ranks, **values}
    recipe = "recipes/causal_lm_pipeline.py"
    whole, tiled = (
        launch("torchrun", tmp_path / str(len(tiles)), {**every, **tiles}, ranks=ranks, recipe=recipe)
        for tiles in ({}, TILES)
    )
    assert_same(tiled, whole)
