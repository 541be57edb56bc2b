"""A run that is cut off and resumed is bit-equal to the uncut one: weights, logs, callbacks' and random states, with
dropout on. benchmarks/resume.py does the same at twelve steps of every layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Finished, gate_has, launch, run_warm
from durability_runs import (
    RUNS,
    STEPS_PER_EPOCH,
    TASKS,
    Run,
    checkpoints,
    different_rows,
    different_weights,
    environment,
    logged,
)
from resume import STEPS, compare, cut_off

pytestmark = pytest.mark.usefixtures("built_ops")

EDGE, MIDDLE = STEPS_PER_EPOCH, STEPS_PER_EPOCH + 2  # an even step, which is logged, and an odd one
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 20}
nightly = pytest.mark.nightly
CUTS = [("plain", EDGE), *((name, EDGE) for name in ("zero2", "pipeline", "pipeline_2x2", "fsdp"))]
CUTS += [(name, MIDDLE) for name in RUNS if name != "zero3_nvme" and name not in TASKS]
GATE = [("plain", EDGE), ("fsdp", EDGE)]
GATE += [(name, MIDDLE) for name in ("ddp", "zero2", "zero3", "pipeline", "causal_lm_streaming")]


def launch_run(run: Run, folder: Path, cache: Path, **flags: Any) -> None:
    status, output = run_warm(run.command(folder, max_steps=STEPS, **flags), run.ranks, environment(cache))
    assert status == 0, output[-3000:]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run that is never cut, made once, saving at every step."""
    home = tmp_path_factory.mktemp("uncut")

    def make(name: str) -> Path:
        folder = home / name
        if not folder.is_dir():
            launch_run(RUNS[name], folder, home / "cache", **SAVING)
        return folder

    return make


@pytest.mark.parametrize(("name", "step"), gate_has(GATE, CUTS))
def test_a_run_that_was_cut_off_ends_bit_equal(
    name: str, step: int, uncut: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = uncut(name)
    folder = cut_off(whole, step, tmp_path / "run")
    launch_run(RUNS[name], folder, whole.parent / "cache", resume="auto", **SAVING)
    found = compare(folder, whole, saved=True)
    assert found == {"equal": True, "weights": 0, "rows": [], "states": []}
    assert len(checkpoints(folder)) == len(checkpoints(whole)) - step + 1  # it did go on from there
    assert {"loss", "eval_loss", "train_loss"} <= {name for row in logged(folder) for name in row}


@nightly
def test_saving_and_evaluating_change_nothing_that_is_learnt(uncut: Callable[[str], Path], tmp_path: Path) -> None:
    whole = uncut("plain")
    folder = tmp_path / "run"
    quiet = {"save_strategy": "no", "eval_strategy": "no", "early_stopping_patience": None}
    launch_run(RUNS["plain"], folder, whole.parent / "cache", **quiet)
    assert different_weights(folder, whole) == []


STOPPING = {
    **TINY,
    "max_steps": 12,
    "learning_rate": 0.0,  # so that nothing is ever better
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 9,
    "metric_for_best_model": "loss",
    "early_stopping_patience": 3,
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return launch("python", tmp_path_factory.mktemp("stopped") / "run", STOPPING)


def as_at(run: Finished, step: int, folder: Path) -> Path:
    """`run` as it was when it had saved at `step`."""
    shutil.copytree(run.folder, folder)
    (folder / "README.md").unlink()  # which is written last
    for checkpoint in checkpoints(folder):
        if int(checkpoint.name.split("-")[1]) > step:
            shutil.rmtree(checkpoint)
    return folder


@pytest.mark.parametrize(
    ("step", "patience", "last"),
    [(4, 3, 8), pytest.param(8, 3, 8, marks=nightly), pytest.param(8, 4, 10, marks=nightly)],
)
def test_early_stopping_counts_on_where_a_run_is_resumed(
    step: int, patience: int, last: int, stopped: Finished, tmp_path: Path
) -> None:
    """The uncut run stops at step 8: its first evaluation is the best, and three more are not better. Cut after it has
    stopped, it trains no further; with more patience it does."""
    assert [path.name for path in checkpoints(stopped.folder)][-1] == "checkpoint-8"
    values = {**STOPPING, "early_stopping_patience": patience, "resume": "auto"}
    run = launch("python", as_at(stopped, step, tmp_path / "run"), values)
    assert run.steps[-1]["step"] == last
    counter = run.json("trainer_state.json")["stateful_callbacks"]["EarlyStoppingCallback"]
    assert counter["attributes"]["early_stopping_patience_counter"] == patience
    if last == 8:
        assert different_weights(run.folder, stopped.folder) == []
        assert different_rows(run.folder, stopped.folder) == []


@nightly
def test_a_callback_that_is_new_on_resumption_is_no_error(tmp_path: Path) -> None:
    without = {name: value for name, value in STOPPING.items() if name != "early_stopping_patience"}
    launch("python", tmp_path / "run", {**without, "max_steps": 2})
    run = launch("python", tmp_path / "run", {**STOPPING, "resume": "auto", "max_steps": 4})
    states = [run.json(f"checkpoint-{step}/trainer_state.json")["stateful_callbacks"] for step in (2, 4)]
    assert ["EarlyStoppingCallback" in state for state in states] == [False, True]


def test_the_results_in_a_folder_are_those_of_its_weights(tmp_path: Path) -> None:
    """A run that goes on and does not evaluate leaves none of an earlier evaluation."""
    flags = {**TINY, "save_strategy": "steps", "save_steps": 2}
    first = launch("python", tmp_path / "run", {**flags, "max_steps": 2})
    assert "eval_loss" in first.json("all_results.json")
    flags = {name: value for name, value in flags.items() if "eval" not in name}
    run = launch("python", tmp_path / "run", {**flags, "do_eval": False, "resume": "auto", "max_steps": 4})
    results = run.json("all_results.json")
    assert "train_loss" in results
    assert not [name for name in results if name.startswith("eval")]
    assert "eval_loss" not in run.output.splitlines()[-1]
