"""install.sh keeps the torch that it finds, and says what it does not know."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

PINNED = "2.13.0a0+nv26.1"  # the form of the versions in NVIDIA's containers, which pip.constraint pins there


def install(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return typed(shlex.join(["bash", "install.sh", *flags]), **env)


def typed(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    command = ["bash", "-c", line]
    return subprocess.run(command, cwd=REPO, env={**kept, **env}, capture_output=True, text=True, timeout=580)


def test_an_unknown_flag_is_refused_and_help_is_given() -> None:
    assert install("--fast").returncode == 2
    assert "unknown flag --fast" in install("--fast").stderr
    assert "--no-venv" in install("--help").stdout


def test_a_python_that_is_missing_is_named() -> None:
    done = install(PYTHON="python9.9")
    assert done.returncode == 2
    assert "there is no python9.9" in done.stderr


@pytest.mark.nightly
def test_a_pinned_torch_is_never_replaced(tmp_path: Path) -> None:
    """The Dockerfile's RUN lines in a container in small: a Python with a torch of its own, and a constraint file that
    pins it."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "image")], check=True)
    python = tmp_path / "image" / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(f"__version__ = {PINNED!r}\n")
    info = site / f"torch-{PINNED}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {PINNED}\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("image\n")
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"torch=={PINNED}\n")

    (line,) = re.findall(r"^RUN (.*)", (REPO / "recipes" / "launch" / "Dockerfile").read_text(), re.MULTILINE)
    done = typed(line, PYTHON=str(python), PIP_CONSTRAINT=str(constraint))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"keeping torch {PINNED}" in done.stdout
    found = [path.name for path in site.glob("torch-*.dist-info")]
    assert found == [info.name]
    assert (site / "torch" / "__init__.py").read_text() == f"__version__ = {PINNED!r}\n"
    assert (tmp_path / "image" / "bin" / "deepspeed").exists()
    assert "deepspeed --num_gpus 2 recipes/seq_cls.py" in done.stdout
