"""How often a step of a shipped config starts something: what made ZeRO slow in the published study was many of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import launch
from one_step import LAYERS

FLAGS: dict[str, Any] = {
    "do_train": True,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "remove_unused_columns": False,
}
GROUPS = 2  # of parameters: with weight decay and without


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_step_over_many_small_tensors_is_one_bucket_and_one_optimizer_launch_a_group(
    name: str, tmp_path: Path
) -> None:
    assert 2 * (LAYERS + 1) > 100, "as many tensors as would show"
    run = launch("python", tmp_path / "run", {**FLAGS, "deepspeed": name}, recipe="tests/runs/one_step.py")
    line = next(line for line in run.output.splitlines() if line.startswith("COUNTS "))
    counts = json.loads(line.removeprefix("COUNTS "))
    assert counts["aten::_fused_adamw_"] == GROUPS
    reductions = sum(many for key, many in counts.items() if key.startswith("c10d::") and "reduce" in key)
    assert 1 <= reductions <= 1 + GROUPS, counts  # the bucket, and a norm of each group
    joined = counts.get("aten::flatten_dense_tensors", 0)
    assert joined <= 1 + GROUPS, counts  # the bucket for its sum, and each group's gradients for its optimizer step
