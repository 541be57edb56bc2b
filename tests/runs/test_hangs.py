"""A rank that hangs, is stopped or vanishes ends the run on all ranks, with one message that names it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from conftest import LAUNCHERS, RECIPE, TINY, flags, launch, steps_of
from living import Living, living
from test_interruption import PIPELINE, SMALL_PIPELINE

LONG = {"max_steps": 4000, "lr_scheduler_type": "constant", "hang_timeout": 5}
FAULTY = "tests/runs/faulty.py"


def ended_with(run: Living, ranks: dict[int, psutil.Process]) -> list[str]:
    """The error messages, once all processes are gone. Of several ranks that are dead at once, DeepSpeed's launcher
    gives the status of any (launcher/launch.py, a set): of the stopped one, too, which was killed."""
    assert run.end() in ((1, 256 - signal.SIGKILL) if "deepspeed" in run.process.args[0] else (1,)), run.output[-3000:]
    _, alive = psutil.wait_procs(ranks.values(), timeout=10)
    assert not alive
    return [line for line in run.output.splitlines() if line.startswith("error:")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("culprit", "launcher", "values"),
    [
        pytest.param(1, "torchrun", {}, id="rank 1 of DDP"),
        pytest.param(0, "torchrun", {"deepspeed": "zero3"}, id="rank 0 of ZeRO-3"),
        pytest.param(0, "deepspeed", SMALL_PIPELINE, id="the first stage of a pipeline"),
    ],
)
def test_a_stopped_rank_is_named_and_nothing_of_the_run_is_left(
    culprit: int, launcher: str, values: dict[str, object], tmp_path: Path
) -> None:
    recipe, folder = PIPELINE if "pipeline_parallel_size" in values else RECIPE, tmp_path / "run"
    every = {**({} if recipe == PIPELINE else TINY), **values, **LONG, "save_strategy": "no"}
    command = [*LAUNCHERS[launcher](2), recipe, *flags({"output_dir": folder, **every})]
    with living(command, recipe, tmp_path / "log") as run:
        run.wait_for(lambda: len(steps_of(folder)) >= 3)
        ranks = run.ranks()
        ranks[culprit].send_signal(signal.SIGSTOP)
        (said,) = ended_with(run, ranks)
    assert f"rank {culprit}" in said
    assert "has not responded" in said


@pytest.mark.parametrize(
    ("culprit", "values"),
    [
        pytest.param(1, {}, id="rank 1 of DDP"),
        pytest.param(0, {"deepspeed": "zero2"}, id="rank 0 of ZeRO-2", marks=pytest.mark.nightly),
        pytest.param(1, SMALL_PIPELINE, id="the last stage of a pipeline", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_whose_batch_never_comes_is_named_with_where_it_stands(
    culprit: int, values: dict[str, object], tmp_path: Path
) -> None:
    recipe, folder = PIPELINE if "pipeline_parallel_size" in values else RECIPE, tmp_path / "run"
    every = {**({} if recipe == PIPELINE else TINY), **values, **LONG, "save_strategy": "no", "hang_blame": True}
    env = {"FAULT": json.dumps({"recipe": recipe, "kind": "sleep", "rank": culprit, "batch": 20})}
    run = launch("torchrun", folder, every, ranks=2, env=env, recipe=FAULTY, check=False)
    assert run.status == 1
    (said,) = run.errors
    assert f"rank {culprit}" in said.partition(" has not moved")[0]
    assert "in sleep (runs/faulty.py:" in said
    assert "waits for it" in said


@pytest.mark.nightly
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_killed_rank_is_named_once(culprit: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*LAUNCHERS["torchrun"](2), RECIPE, *flags({"output_dir": folder, **TINY, **LONG})]
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: len(steps_of(folder)) >= 3)
        ranks = run.ranks()
        ranks[culprit].kill()
        (said,) = ended_with(run, ranks)
    assert f"rank {culprit} " in said
