"""`finetune doctor --deep` on this machine, and trials that fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO

from finetune.doctor import trials
from finetune.doctor.trials import Trial


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_this_machine_can_do_what_the_defaults_need() -> None:
    command = [sys.executable, "-m", "finetune.cli", "doctor", "--deep", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(done.stdout)["results"]}
    expected = {trial.name for trial in trials.TRIALS}
    assert expected <= set(results)
    failed = [name for name in expected if results[name]["status"] == "failed"]
    assert failed == [], [results[name] for name in failed]


def _raises(folder: Path) -> None:
    raise ValueError("not here\nand more")


def _dies(folder: Path) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _waits(folder: Path) -> None:
    time.sleep(60)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("do", "said"),
    [(_raises, "ValueError: not here"), (_dies, "a rank was ended by SIGKILL"), (_waits, "nothing after 15 s")],
)
def test_a_trial_that_fails_is_named_and_leaves_nobody(
    do: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial("fails", do, "a mend")  # type: ignore[arg-type]
    monkeypatch.setattr(trials, "TRIALS", (trial,))
    monkeypatch.setattr(trials, "LIMIT_SECONDS", 15)
    start = time.monotonic()
    assert trials._tried(multiprocessing.get_context("fork"), trial, 2, tmp_path) == said
    assert time.monotonic() - start < 40
    assert multiprocessing.active_children() == []
