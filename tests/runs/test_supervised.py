"""Real runs under `finetune supervise`: what is killed starts again, what always fails stops and is named."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import LAUNCHERS, NOT_JUDGED, RECIPE, TINY, Finished, flags, launch, run_to_its_end, steps_of
from living import living

from finetune.run.supervised import told

pytestmark = pytest.mark.nightly

STEPS = 400
LONG = {**TINY, **NOT_JUDGED, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 25, "save_total_limit": 2}
LONG |= {"lr_scheduler_type": "constant"}


def supervise(launcher: str, ranks: int, recipe: str, values: dict[str, Any]) -> list[str]:
    command = [*LAUNCHERS[launcher](ranks), recipe, *flags(values)]
    return [sys.executable, "-m", "finetune.cli", "supervise", "--", *command]


@pytest.mark.parametrize(
    ("launcher", "victim", "values"),
    [
        pytest.param("torchrun", "rank 1", {}, id="a rank under torchrun"),
        pytest.param("deepspeed", "launcher", {"deepspeed": "zero2"}, id="deepspeed, whose ranks live on without it"),
    ],
)
@pytest.mark.usefixtures("built_ops")
def test_what_is_killed_starts_again_and_ends_as_if_it_had_not_been(
    launcher: str, victim: str, values: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = supervise(launcher, 2, RECIPE, {**LONG, **values, "output_dir": folder})
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: len(steps_of(folder)) >= 60)
        (outermost,) = psutil.Process(run.process.pid).children()
        (outermost if victim == "launcher" else run.ranks()[1]).kill()
        assert run.end(240) == 0, run.output[-5000:]
    trainings = [one for one in told(folder / "_supervise") if one["event"] == "training"]
    assert [one["attempt"] for one in trainings] == [1, 2], run.output[-5000:]
    assert trainings[1]["step"] >= 50
    if victim == "rank 1":
        said = "\n".join(one["said"] for one in told(folder / "_supervise"))
        assert re.search("rank 1 (was killed by SIGKILL|is gone)", said), said  # as torchrun or rank 0 notices it first
    uncut = launch(launcher, tmp_path / "uncut", {**LONG, **values}, ranks=2)
    again = Finished(0, "", folder)
    assert [row["step"] for row in again.steps] == list(range(1, STEPS + 1))
    assert again.column("loss") == pytest.approx(uncut.column("loss"), rel=1e-6)


def test_a_row_that_can_never_be_read_stops_the_run_and_is_named(tmp_path: Path) -> None:
    folder, row = tmp_path / "run", 17
    values = {**TINY, **NOT_JUDGED, "output_dir": folder, "save_strategy": "steps", "save_steps": 2}
    fault = {"kind": "row", "rank": 0, "row": row, "recipe": RECIPE}
    env = {"FAULT": json.dumps(fault), "HF_HUB_OFFLINE": "1"}
    status, output = run_to_its_end(supervise("python", 1, "tests/runs/faulty.py", values), env)
    assert status == 1, output[-3000:]
    stopped = told(folder / "_supervise")[-1]
    assert stopped["attempt"] == 2, output[-5000:]
    named = re.findall(r"has failed twice, with the same samples: rows ([^;]*); or while rows (.*) were read", output)
    assert named, output[-3000:]
    assert row in {*stopped["samples"], *stopped["ahead"]}, stopped


def test_a_signal_to_the_supervisor_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = supervise("torchrun", 2, RECIPE, {**LONG, "output_dir": folder})
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: len(steps_of(folder)) >= 30)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.output[-3000:]
    last = steps_of(folder)[-1]["step"]
    assert (folder / f"checkpoint-{last}").is_dir()
    status, output = run_to_its_end(command, {"HF_HUB_OFFLINE": "1"})
    assert status == 0, output[-3000:]
    assert [one["step"] for one in told(folder / "_supervise") if one["event"] == "training"] == [0, last]
