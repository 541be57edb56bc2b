"""The picture of a mixture's load, from a file that anyone may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_folders import run_folder

from finetune.report.run_folder import read_run
from finetune.report.run_pictures import load_picture
from finetune.report.run_sections import run_sections
from finetune.report.shapes import Box


def test_each_expert_has_a_cell_that_says_its_share() -> None:
    picture = load_picture({"tokens": [[10, 30, 0, 0], [10, 10, 10, 10]]}, 600.0)
    assert picture is not None
    cells = [shape for shape in picture.shapes if isinstance(shape, Box)]
    assert len(cells) == 8
    assert cells[1].title == "layer 1, expert 2: 30 tokens, 3.00 of the mean"
    assert [cell.colour == "limit" for cell in cells] == [False, False, True, True] + 4 * [False]
    assert picture.alt == "The busiest expert gets 3.00 times the mean of its layer; 2 of 8 get no token."
    assert max(cell.x + cell.width for cell in cells) <= 600


@pytest.mark.parametrize(
    "tokens",
    [None, [], "x", [[]], [[1], [1, 2]], [[1, "a"]], [[-1, 2]], [[0, 0]], [[1] * 600], [[1]] * 200, {"a": 1}],
)
def test_what_is_no_table_has_no_picture(tokens: Any) -> None:
    assert load_picture({"tokens": tokens}, 600.0) is None


def test_a_report_shows_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    assert "Experts" not in [section.title for section in run_sections([read_run(folder, "run")])]
    (folder / "experts.json").write_text(json.dumps({"step": 3, "layers": ["a"], "tokens": [[1, 3]]}))
    assert "Experts" in [section.title for section in run_sections([read_run(folder, "run")])]
