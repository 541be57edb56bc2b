"""What an installed `finetune` consists of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from conftest import REPO


def test_every_file_of_the_package_is_installed(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"  # a copy, for setuptools writes beside what it reads
    shutil.copytree(REPO / "finetune", source / "finetune", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_py", "--build-lib", built]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    wanted = {path.relative_to(source) for path in source.joinpath("finetune").rglob("*") if path.is_file()}
    assert len([path for path in wanted if path.suffix == ".json"]) > 15
    assert {path.relative_to(built) for path in built.rglob("*") if path.is_file()} == wanted
