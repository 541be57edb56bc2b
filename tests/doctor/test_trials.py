"""`finetune doctor --deep` on this machine, and trials that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPO

from finetune.doctor import ops, trials
from finetune.doctor.ops import build
from finetune.dsconfig.rules.offload import compiler
from finetune.host.result import ABSENT, FAILED
from finetune.measure import start
from finetune.training.builds import STALE_BUILD_SECONDS


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_this_machine_can_do_what_the_defaults_need() -> None:
    command = [sys.executable, "-m", "finetune.cli", "doctor", "--deep", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {result["name"]: result for result in json.loads(done.stdout)["results"]}
    expected = {trial.name for trial in trials.TRIALS}
    assert expected <= set(results)
    failed = [name for name in expected if results[name]["status"] == "failed"]
    assert failed == [], [results[name] for name in failed]


@pytest.mark.nightly
@pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
def test_a_build_that_was_cut_off_is_told_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - STALE_BUILD_SECONDS - 60,) * 2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    told = build(ops.ON_CPU)
    assert told is not None
    assert f"an op cannot be built: {lock}: a build of DeepSpeed's deepspeed_shm_comm was interrupted" in told


@pytest.mark.parametrize("trial", trials.TRIALS, ids=lambda trial: trial.name)
def test_a_trial_is_a_run_of_its_layout(trial: trials.Trial) -> None:
    job, config = trials.planned(trial)
    section = (config or {}).get("zero_optimization", {})
    assert job.zero.stage == section.get("stage", 0)
    assert section.items() >= (trial.zero or {}).items()
    assert job.stages == (job.world_size if trial.layout == "pipeline" else 1)
    assert job.group == (trials.RANKS if trial.group else 1)


def test_trials_that_fail_are_named_with_their_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the launcher: what a rank that fails would say."""
    monkeypatch.setattr(start, "started", lambda *_: ["sh", "-c", "echo 'ValueError: not here'; exit 1", "sh"])
    monkeypatch.setattr(trials, "build", lambda names: "no op" if names else None)
    step = trials.TRIALS[1]
    lacking, unbuilt = replace(step, needs="gpu"), replace(step, ops=("CPUAdamBuilder",))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(trials, "compiler", lambda: "g++")
    monkeypatch.setattr(trials, "TRIALS", (step, replace(step, resumes=True), lacking, unbuilt))
    fails, resumes, absent, built = trials.run_trials()
    for result in (fails, resumes):
        assert (result.status, result.mend, result.needed) == (FAILED, trials.STEP, True)
        assert "ValueError: not here" in result.found
    assert (absent.status, absent.found) == (ABSENT, "needs a GPU: DeepSpeed's quantizer has no CPU build")
    assert (built.status, built.found, built.mend) == (FAILED, "no op", trials.BUILD)


def test_a_resumed_run_that_loses_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "measure", lambda *_, **__: None)
    job, config = trials.planned(trials.TRIALS[1])
    losses = iter(([1.0, 0.5], [1.0, 0.5], [1.0, 0.5], [1.0, 0.6]))
    monkeypatch.setattr(trials, "_losses", lambda run: next(losses))
    assert trials.resumed(job, config) is None
    assert "losses are [1.0, 0.6], but should be [1.0, 0.5]" in str(trials.resumed(job, config))
