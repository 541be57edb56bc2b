"""A resumed pipeline is cut where it was cut before: bounds that are measured anew may be others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RequestError
from finetune.training.pipeline.partition import saved_bounds

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
