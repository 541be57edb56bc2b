"""Every example of docs/python.md is run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from conftest import REPO

BLOCKS = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "python.md").read_text(), re.DOTALL)


def of_several_ranks(block: str) -> bool:
    return "ranks=2" in block


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [f"film number {i} is {word},{word}" for i in range(30) for word in ("good", "bad")]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return tmp_path


def test_the_examples_run_in_their_order(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [block for block in BLOCKS if not of_several_ranks(block)]
    assert len(found) == len(BLOCKS) - 1 > 4
    (at_home / "page.py").write_text("".join(found))
    runpy.run_path("page.py")
    said = capsys.readouterr().out
    assert "Did you mean --num_train_epochs?" in said
    assert 'Did you mean "gradient_clipping"?' in said
    assert "It fits" in said
    assert (at_home / "loss.svg").is_file()


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_the_example_of_several_ranks_runs(at_home: Path) -> None:
    (block,) = filter(of_several_ranks, BLOCKS)
    (at_home / "page.py").write_text(f"from finetune import train\n{block}")
    assert len(runpy.run_path("page.py")["run"].metrics["peak_memory_gib_per_rank"]) == 2
