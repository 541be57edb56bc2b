"""A resumed pipeline is cut where it was cut before: bounds that are measured anew may be others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.training.pipeline.costs import LayerCost
from finetune.training.pipeline.partition import saved_bounds
from finetune.training.pipeline.stages import MemoryRule, cut

RECORD = {"stages": 3, "pipelines": 2, "partition_method": "balanced", "bounds": [0, 1, 5, 8]}


def bounds(folder: Path, record: dict[str, Any], method: str = "balanced", stages: int = 3, pipelines: int = 2) -> Any:
    (folder / "pipeline.json").write_text(json.dumps(record))
    return saved_bounds(str(folder), method, stages, pipelines, 8)


def test_the_bounds_of_the_checkpoint_are_kept(tmp_path: Path) -> None:
    assert bounds(tmp_path, RECORD) == [0, 1, 5, 8]


@pytest.mark.parametrize("other", [{"method": "uniform"}, {"stages": 2}, {"pipelines": 1}])
def test_another_method_or_layout_is_cut_anew(other: dict[str, Any], tmp_path: Path) -> None:
    assert bounds(tmp_path, RECORD, **other) is None


def test_without_a_record_it_is_cut_anew(tmp_path: Path) -> None:
    assert saved_bounds(None, "balanced", 3, 2, 8) is None
    assert saved_bounds(str(tmp_path), "balanced", 3, 2, 8) is None
    older = {name: value for name, value in RECORD.items() if name not in ("partition_method", "bounds")}
    assert bounds(tmp_path, older) is None


@pytest.mark.parametrize(
    "wrong", [None, "0,8", [0, 5, 8], [0, 5, 1, 8], [0, 0, 5, 8], [0, 1, 5, 9], [0, 1.0, 5, 8], [[], 8]]
)
def test_bounds_that_cut_no_such_model_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cuts 8 layers in 3 stages at"):
        bounds(tmp_path, RECORD | {"bounds": wrong})


def costs(*layers: tuple[int, float, int]) -> list[LayerCost]:
    """Layers of (parameters, seconds, bytes kept), a third of the seconds forward."""
    return [LayerCost(count, count, seconds / 3, seconds * 2 / 3, kept) for count, seconds, kept in layers]


@pytest.mark.parametrize(
    ("micro_batches", "limit", "expected"),
    [
        # Four like layers that keep 10 bytes a micro-batch, on two stages: the first holds two micro-batches, so that
        # two layers there take 40 and one takes 20; the second holds one, and three layers there take 30.
        (8, 40, [0, 2, 4]),
        (8, 39, [0, 1, 4]),
        (2, 39, [0, 1, 4]),
        (1, 39, [0, 2, 4]),  # one micro-batch is never more than one
        (1, 20, [0, 2, 4]),
    ],
)
def test_a_balanced_cut_counts_the_micro_batches_that_each_stage_holds(
    micro_batches: int, limit: int, expected: list[int]
) -> None:
    layers = costs(*[(1, 1.0, 10)] * 4)
    assert cut([None] * 4, layers, "balanced", 2, micro_batches, MemoryRule(0, limit)) == expected  # type: ignore[list-item]


def test_a_balanced_cut_counts_the_states_of_weights_and_what_is_tied() -> None:
    layers = [LayerCost(10, 30, 0.1, 0.2, 0), *costs((10, 0.3, 0), (10, 0.3, 0), (10, 0.3, 0))]
    rule = [None] * 4, layers, "balanced", 2, 4
    assert cut(*rule, MemoryRule(2, None)) == [0, 2, 4]  # type: ignore[arg-type]
    assert cut(*rule, MemoryRule(2, 80)) == [0, 2, 4]  # type: ignore[arg-type]
    assert cut(*rule, MemoryRule(2, 79)) == [0, 1, 4]  # type: ignore[arg-type]


def test_deepspeeds_own_methods_cut_as_deepspeed_does() -> None:
    layers = costs((60, 1, 0), (10, 1, 0), (10, 1, 0), (10, 1, 0), (10, 1, 0), (20, 1, 0))
    assert cut([None] * 6, layers, "uniform", 2, 4, MemoryRule(1, None)) == [0, 3, 6]  # type: ignore[list-item]
    assert cut([None] * 6, layers, "parameters", 2, 4, MemoryRule(1, None)) == [0, 1, 6]  # type: ignore[list-item]
    without = costs((60, 1, 0), (0, 1, 0), (0, 1, 0), (10, 1, 0))
    with pytest.raises(RequestError, match=r"leaves stage 1 of 3 without weights of its own\. Use balanced"):
        cut([None] * 4, without, "uniform", 3, 4, MemoryRule(1, None))  # type: ignore[list-item]
