"""What others measured on a GPU is planned: docs/results/plan_public.md has all of it."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import plan_longest
import plan_public
import plan_speed
import pytest

from finetune.plan.machine import find_machine
from finetune.plan.seconds import plan_seconds

PUBLIC = json.loads((plan_public.RESULTS / "plan_public.json").read_text())


@pytest.mark.parametrize("row", PUBLIC["t4"], ids=lambda row: "-".join(map(str, list(row.values())[:4])))
def test_an_allocators_peak_on_a_t4_is_planned_within_one_percent(row: dict[str, Any]) -> None:
    """Eager attention's, too: its softmax takes a tensor more in the backward pass on a GPU than on a CPU."""
    assert plan_public.on_t4(row, PUBLIC["models"][row["model"]]) == pytest.approx(row["mib"], rel=0.01)


def test_the_longest_published_text_that_ranks_share_is_planned_within_a_tenth() -> None:
    row = next(row for row in PUBLIC["alst"] if row["sharing"] > 1)
    assert plan_longest.planned(row) == pytest.approx(row["thousands"], rel=0.1)


def test_published_speeds_are_planned_within_an_eighth_half_of_them_within_a_twentieth() -> None:
    """Of each publication by itself, but for those that say little of how they ran."""
    others, foundry = plan_speed.speeds(PUBLIC)
    qwen = [row for row in others if row.cells[0] == "Qwen"]
    for rows in (foundry, qwen, others):
        assert median(abs(row.error) for row in rows) < 0.07
        assert sorted(abs(row.error) for row in rows)[int(0.75 * len(rows))] < 0.13
    assert len(others) > 40
    assert len(foundry) == 191


def test_seven_billion_parameters_lose_little_from_128_to_512_gpus() -> None:
    """Published throughput falls by 8% there (pytorch.org/blog/maximizing-training, Llama 2 7B on A100s)."""
    row = {**next(row for row in PUBLIC["speed"] if row["source"] == "fms-fsdp"), "layout": "zero3"}
    few, many = (
        plan_seconds(plan_speed.job_of({**row, "gpus": gpus}, {}), find_machine("A100-80GB")).tokens_per_second / gpus
        for gpus in (128, 512)
    )
    assert 0.88 < many / few < 1
