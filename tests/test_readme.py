"""Every command of the README is run, shortened by overrides, and every file that it names is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, TINY, flags, free_port

README = (REPO / "README.md").read_text()
PLACES = ("reviews.csv", "train.csv", "test.csv", "train.tsv", "dev.tsv", "test.tsv")
# What the tests themselves are started by; the whole gate, .ci/run, begins with it.
INSTALLS = re.compile(r"install\.sh|pytest|ruff")


def commands(text: str) -> list[str]:
    """The lines of the bash blocks, continued lines joined, activation left out."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.replace(". .venv/bin/activate && ", "").strip() for line in lines if line.strip()]


def to_run() -> list[str]:
    return [command for command in commands(README) if not INSTALLS.search(command)]


def test_the_readme_has_commands_for_every_launcher() -> None:
    found = to_run()
    assert len(found) >= 7
    assert {command.split()[0] for command in found} >= {"python", "deepspeed", "torchrun", "accelerate", "finetune"}


def run(command: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", to_run())
def test_a_command_of_the_readme_works(command: str, minilm: Path, tmp_path: Path) -> None:
    for name in PLACES:
        separator = "\t" if name.endswith("tsv") else ","
        rows = [f"row number {i} of many{separator}{'good' if i % 2 else 'bad'}\n" for i in range(60)]
        (tmp_path / name).write_text(f"text{separator}label\n" + "".join(rows))
        command = re.sub(rf"(?<=\s){re.escape(name)}", str(tmp_path / name), command)
    command = command.replace("path/to/model", str(minilm))
    if "recipes/seq_cls.py" in command:
        short: dict[str, Any] = {**TINY, "max_steps": 2, "output_dir": tmp_path / "run"}
        command = f"{command} {' '.join(flags(short))}"
        port = free_port()
        command = command.replace("deepspeed --num_gpus", f"deepspeed --master_port {port} --num_gpus")
        command = command.replace("torchrun --", f"torchrun --master_port {port} --")
    done = run(command)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    if "recipes/seq_cls.py" in command:
        assert (tmp_path / "run" / "model.safetensors").is_file()
        (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        code = block.replace("runs/seq_cls", str(tmp_path / "run"))
        used = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert used.returncode == 0, used.stderr[-2000:]
        assert "'score'" in used.stdout


def test_every_file_that_the_readme_names_is_there() -> None:
    named = set(re.findall(r"(?:ds_configs|recipes|docs|benchmarks)/[\w./-]*", README))
    assert {"recipes/seq_cls.py", "recipes/configs/", "ds_configs/README.md", "docs/results/"} <= named
    assert [name for name in named if not (REPO / name).exists()] == []
