"""recipes/launch/slurm.sbatch on a real Slurm: two tasks train, the signal before the time limit has them save, and the
job, sent back, ends as a run that was never cut."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import slurm
from conftest import RECIPE, REPO, TINY, Finished, flags, launch, steps_of

ENDS = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
SBATCH = "recipes/launch/slurm.sbatch"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm() as env:
        yield env


def submit(env: dict[str, str], log: Path, folder: Path, values: dict[str, Any], *limits: str) -> str:
    command = ["sbatch", "--parsable", "--ntasks-per-node", "2", "--output", str(log), *limits, SBATCH, RECIPE]
    command += flags({"output_dir": folder, **values})
    each = {**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RANKS_PER_TASK": "1"}
    return subprocess.run(command, cwd=REPO, env=each, capture_output=True, text=True, check=True).stdout.strip()


def until(condition: Callable[[], Any], seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()[-3000:] if log.exists() else "no log"
        time.sleep(1)


def state_of(job: str, env: dict[str, str]) -> str:
    return subprocess.run(["scontrol", "show", "job", job], env=env, capture_output=True, text=True, check=True).stdout


def test_two_tasks_train_as_the_ranks_of_any_launcher(cluster: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = submit(cluster, log, tmp_path / "run", {**TINY, "save_strategy": "epoch"})
    until(lambda: any(f"JobState={word}" in state_of(job, cluster) for word in ENDS), 200, log)
    assert "JobState=COMPLETED" in state_of(job, cluster), log.read_text()[-3000:]
    run = Finished(0, log.read_text(), tmp_path / "run")
    assert "run: 2 rank(s)" in run.output
    other = launch("torchrun", tmp_path / "other", TINY, ranks=2)
    assert run.column("loss") == pytest.approx(other.column("loss"), rel=1e-4)


def test_before_its_time_limit_a_job_saves_goes_back_and_goes_on(cluster: dict[str, str], tmp_path: Path) -> None:
    values = {**TINY, "max_steps": 100_000, "save_strategy": "steps", "save_steps": 100_000}
    values |= {"lr_scheduler_type": "constant", "learning_rate": 1e-4}
    folder, log = tmp_path / "run", tmp_path / "log"
    # Slurm looks at the limits twice a minute or less: the signal comes 45 to 105 seconds before the end.
    job = submit(cluster, log, folder, values, "--time", "2", "--signal", "B:USR1@45")
    until(lambda: "Restarts=1" in state_of(job, cluster), 150, log)
    (checkpoint,) = folder.glob("checkpoint-*")
    cut = int(checkpoint.name.split("-")[1])
    said = log.read_text()
    assert f"stopped by SIGUSR1 after step {cut}. checkpoint-{cut} is saved" in said
    assert "the job is requeued" in said
    until(lambda: steps_of(folder)[-1]["step"] >= cut + 20, 150, log)
    subprocess.run(["scancel", job], env=cluster, check=True)
    rows = [row for row in steps_of(folder) if row["step"] <= cut + 20]
    assert [row["step"] for row in rows] == list(range(1, cut + 21))
    uncut = launch("torchrun", tmp_path / "uncut", {**values, "max_steps": cut + 20}, ranks=2)
    assert uncut.column("loss")[: len(rows)] == pytest.approx(
        [row["loss"] for row in rows], rel=0.02, abs=0.01
    )  # a task has other threads


def test_a_job_without_a_recipe_says_how_it_is_used(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SBATCH], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
