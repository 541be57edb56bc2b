"""Warm ranks (tests/warm_ranks.py) are what the true launchers start, and end as these end them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import launch

# Prints what a rank is told, and by how many threads it would compute.
TELL = """
import json, os, sys
words = [word for word in sys.argv[1:] if not word.startswith("--output_dir") and not word.startswith("/")]
import torch
told = {"environment": dict(os.environ), "words": words, "path": sys.path[0], "threads": torch.get_num_threads()}
print(f"TOLD {json.dumps(told)}", flush=True)
"""
# Of one launch only, of the agent in which torchrun keeps its store, of the shell, and of a look for GPUs by NVML.
NOT_COMPARED = {"MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}
NOT_COMPARED |= {"_", "SHLVL", "OLDPWD", "PWD", "LC_CTYPE", "PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK"}
ZERO_1 = ["--use_deepspeed", "--zero_stage", "1"]


def told(output: str) -> list[dict[str, Any]]:
    """Of each rank."""
    decoder = json.JSONDecoder()
    found = [decoder.raw_decode(part)[0] for part in output.split("TOLD ")[1:]]
    for one in found:
        one["environment"] = {k: v for k, v in one["environment"].items() if k not in NOT_COMPARED}
    return sorted(found, key=lambda one: one["environment"].get("RANK", "0"))


@pytest.mark.parametrize(
    ("launcher", "ranks", "words"),
    [
        pytest.param("python", 1, [], id="python"),
        pytest.param("deepspeed", 2, [], id="deepspeed"),
        pytest.param("torchrun", 2, [], id="torchrun"),
        pytest.param("torchrun", 1, [], id="torchrun, alone", marks=pytest.mark.nightly),
        pytest.param("accelerate", 2, [], id="accelerate"),
        pytest.param("accelerate", 2, ZERO_1, id="accelerate's DeepSpeed", marks=pytest.mark.nightly),
    ],
)
def test_a_warm_rank_is_told_what_the_true_launcher_tells(
    launcher: str, ranks: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # torchrun sets it then
    (tmp_path / "tell.py").write_text(TELL)
    how: dict[str, Any] = {"ranks": ranks, "words": words, "recipe": str(tmp_path / "tell.py")}
    true, warm = (told(launch(launcher, tmp_path, {"a": 1}, cold=cold, **how).output) for cold in (True, False))
    assert len(true) == len(warm) == ranks
    for ours, theirs in zip(warm, true, strict=True):
        mine, its = ours.pop("environment"), theirs.pop("environment")
        assert {name: mine.get(name) for name in mine | its if mine.get(name) != its.get(name)} == {}
        assert ours == theirs


FAILING = """
import os, signal, sys, time
if os.environ.get("RANK", "0") == "0":
    time.sleep(60)
how = os.environ["HOW"]
os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else sys.exit(int(how))
"""


@pytest.mark.parametrize(
    ("launcher", "how", "status"),
    [("deepspeed", "2", 2), ("deepspeed", "killed", 247), ("torchrun", "2", 1), ("torchrun", "killed", 1)],
)
def test_when_a_rank_fails_the_others_are_ended_with_the_launchers_status(
    launcher: str, how: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run = launch(launcher, tmp_path, {}, ranks=2, env={"HOW": how}, recipe=str(tmp_path / "failing.py"), check=False)
    assert run.status == status


def test_plain_python_that_is_killed_ends_as_it_does_cold(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert launch("python", tmp_path, {}, recipe=str(tmp_path / "killed.py"), check=False).status == -signal.SIGKILL
