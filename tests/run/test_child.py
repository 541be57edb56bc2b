"""A process that this one starts imports what this one can, and nothing of a stranger's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from finetune.doctor.ops import build
from finetune.measure.outcome import DONE
from finetune.measure.processes import run
from finetune.run.environment import environment_of_child

if sys.version_info < (3, 11):
    pytest.skip("Python 3.10 has no PYTHONSAFEPATH", allow_module_level=True)


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: its modules say that they were imported."""
    for name in ("torch", "deepspeed", "finetune"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the stranger has {name}')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", [["-m", "finetune.versions"], ["-c", "import finetune.versions"]])
def test_a_module_is_not_taken_from_the_working_folder(strange: Path, how: list[str]) -> None:
    command = [sys.executable, *how]
    assert subprocess.run(command, env=environment_of_child(), check=False).returncode == 0
    assert run(command, strange.parent / "log.txt", 60.0).kind == DONE


def test_an_op_is_built_by_our_own_module(strange: Path) -> None:
    said = build(["NoSuchBuilder"])
    assert "the stranger" not in str(said)
