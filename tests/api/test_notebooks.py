"""docs/notebooks/: what benchmarks/make_notebooks.py writes, executed, and without paths of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from make_notebooks import FOLDER, NOTEBOOKS, made

MOST_BYTES = 100_000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_executed_small_and_without_paths_of_a_machine(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    text = path.read_text()
    cells = json.loads(text)["cells"]
    assert ["".join(cell["source"]) for cell in cells] == NOTEBOOKS[name]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert not any(one["output_type"] == "error" for cell in code for one in cell["outputs"])
    assert len(text) < MOST_BYTES
    assert re.findall(r"/(?:tmp|root|home|work|usr)\b|C:\\\\", text) == []
    assert re.findall(r"<script|src=\\\"(?!data:)|https?://(?!www\.w3\.org)", text) == []


def test_every_notebook_is_made_here() -> None:
    assert {path.stem for path in (REPO / "docs" / "notebooks").glob("*.ipynb")} == {*NOTEBOOKS}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient (extra dev) is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel (extra dev) is not installed")
    said = [texts(cell) for cell in made(name, tmp_path).cells]
    assert any("Did you mean" in text for text in said)


def texts(cell: Any) -> str:
    return json.dumps(cell.get("outputs", []))
