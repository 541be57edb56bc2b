"""A signal to any rank, or to the launcher, stops all ranks after a checkpoint, and the run goes on as if never cut."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import LAUNCHERS, RECIPE, TINY, Finished, flags, launch, steps_of
from living import living

NIGHTLY = pytest.mark.nightly  # what is sent a signal is a true launch, which takes half a minute
PIPELINE = "recipes/causal_lm_pipeline.py"
SMALL_PIPELINE = {
    "max_train_samples": 2000,
    "sample_tokens": 0,
    "schedule_step": 0,
    "pipeline_parallel_size": 2,
    "bf16": False,
    "eval_strategy": "no",
    "logging_steps": 1,
}
# So many steps that it is still at it when the signal comes; the rest is left to the run that goes on.
LONG = {"max_steps": 4000, "save_strategy": "steps", "save_steps": 4000, "lr_scheduler_type": "constant"}


@pytest.mark.parametrize(
    ("launcher", "number", "to", "status", "values"),
    [
        pytest.param("python", signal.SIGTERM, "rank 0", 75, {}, id="alone"),
        pytest.param("torchrun", signal.SIGUSR1, "rank 1", 1, {}, id="one rank of DDP", marks=NIGHTLY),
        # With a data loader's worker: this launcher ends workers first.
        pytest.param(
            *("deepspeed", signal.SIGTERM, "launcher", 1, {"deepspeed": "zero2", "dataloader_num_workers": 1}),
            id="deepspeed's launcher",
            marks=NIGHTLY,
        ),
        pytest.param(
            *("torchrun", signal.SIGTERM, "launcher", 1, {"deepspeed": "zero3"}),
            id="torchrun",
            marks=NIGHTLY,
        ),
        pytest.param(
            "deepspeed", signal.SIGUSR1, "rank 1", 75, SMALL_PIPELINE, id="one stage of a pipeline", marks=NIGHTLY
        ),
    ],
)
@pytest.mark.usefixtures("built_ops")
def test_all_ranks_stop_with_a_checkpoint_from_which_the_run_goes_on(
    launcher: str, number: signal.Signals, to: str, status: int, values: dict[str, Any], tmp_path: Path
) -> None:
    recipe = PIPELINE if "pipeline_parallel_size" in values else RECIPE
    every = {**(values if recipe == PIPELINE else {**TINY, **values}), **LONG}
    ranks, folder = 1 if launcher == "python" else 2, tmp_path / "run"
    command = [*LAUNCHERS[launcher](ranks), recipe, *flags({"output_dir": folder, **every})]
    with living(command, recipe, tmp_path / "log") as run:
        run.wait_for(lambda: len(steps_of(folder)) >= 3)
        (run.launcher_of_this_host() if to == "launcher" else run.ranks()[int(to[-1])]).send_signal(number)
        assert run.end() == status, run.output[-3000:]  # torchrun's is 1 whatever a rank's was
        output = run.output
    (checkpoint,) = folder.glob("checkpoint-*")
    last = int(checkpoint.name.split("-")[1])
    said = f"stopped by {number.name} after step {last}. checkpoint-{last} is saved"
    assert output.count(said) == 1, output[-3000:]
    assert "error:" not in output, output[-3000:]
    assert last == steps_of(folder)[-1]["step"]
    if recipe == PIPELINE or launcher == "deepspeed":
        return  # resuming is test_pipeline's, and what follows is tried with others
    more = {**every, "max_steps": last + 2, "resume": "allow" if launcher == "python" else "auto"}
    resumed = launch(launcher, folder, more, ranks=ranks, recipe=recipe)
    assert [row["step"] for row in resumed.steps] == list(range(1, last + 3))
    uncut = launch(launcher, tmp_path / "uncut", {**every, "max_steps": last + 2}, ranks=ranks, recipe=recipe)
    assert resumed.column("loss") == pytest.approx(uncut.column("loss"), rel=1e-5)


@NIGHTLY
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_in_the_last_evaluation_of_the_training_is_heeded_at_its_end(ranks: int, tmp_path: Path) -> None:
    folder, launcher = tmp_path / "run", "python" if ranks == 1 else "torchrun"
    values = {
        **TINY,
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    values |= {"max_eval_samples": 355, "per_device_eval_batch_size": 1}
    command = [*LAUNCHERS[launcher](ranks), RECIPE, *flags({"output_dir": folder, **values})]
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: len(steps_of(folder)) == 2)
        run.ranks()[ranks - 1].send_signal(signal.SIGTERM)
        assert run.end() == (75 if ranks == 1 else 1), run.output[-2000:]
        assert run.output.count("stopped by SIGTERM after step 2. checkpoint-2 is saved") == 1, run.output[-2000:]
    finished = launch(launcher, folder, {**values, "resume": "auto"}, ranks=ranks)
    assert (finished.folder / "model.safetensors").is_file()
    again = launch(launcher, folder, {**values, "resume": "allow"}, ranks=ranks)
    assert "nothing is left to do" in again.output  # and status 0, for a cluster


@NIGHTLY
def test_a_run_that_cannot_save_in_time_ends_with_the_same_status(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = {**TINY, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "stop_grace": 1}
    values |= {"max_eval_samples": 355, "per_device_eval_batch_size": 1, "max_seq_length": 256}
    values |= {"model_size": "base", "per_device_train_batch_size": 1}  # an evaluation of many seconds
    command = [*LAUNCHERS["python"](1), RECIPE, *flags({"output_dir": folder, **values})]
    with living(command, RECIPE, tmp_path / "log", {"OMP_NUM_THREADS": "1"}) as run:
        run.wait_for(lambda: len(steps_of(folder)) == 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.output[-2000:]
        assert "stopped by SIGTERM, but not all ranks had saved within --stop_grace 1 seconds" in run.output


@NIGHTLY
def test_nothing_is_saved_where_nothing_was_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*LAUNCHERS["python"](1), RECIPE, *flags({"output_dir": folder, **TINY, "max_steps": 4000})]
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: steps_of(folder))
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == 75
        finished = Finished(75, run.output, folder)
    assert "Nothing was saved" in finished.output
    assert not list(folder.glob("checkpoint-*"))
