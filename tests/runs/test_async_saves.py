"""Real runs of several ranks whose checkpoints are written while they train: the same bytes as saved synchronously, and
a signal that is heeded within its grace."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import LAUNCHERS, RECIPE, TINY, flags, launch, run_to_its_end
from living import living
from saved_content import content_of

from finetune.training.checkpoints.manifest import checkpoints_in, problems

SAVES = {**TINY, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_strategy": "no"}
PIPELINE, HELD_UP = "recipes/causal_lm_pipeline.py", "tests/runs/held_up.py"
SHAPE = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=32,dropout=0.1"
PIPED = {
    "config_overrides": SHAPE,
    "max_train_samples": 3,
    "sample_tokens": 0,
    "schedule_step": 0,
    "pipeline_parallel_size": 2,
    "partition_method": "parameters",
    "bf16": False,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 4,
    "eval_strategy": "no",
}
OF_THE_MOMENT = ("manifest.json", "run.json", "training_args.bin", "trainer_state.json")  # times, names and flags


def content(checkpoint: Path) -> dict[str, bytes]:
    return content_of(checkpoint, without=OF_THE_MOMENT)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="DDP"),
        *(pytest.param({"deepspeed": f"zero{stage}"}, id=f"ZeRO-{stage}") for stage in range(4)),
        pytest.param({"deepspeed": "zero2_offload"}, id="ZeRO-2, offloaded"),
        pytest.param({"deepspeed": "zero3_offload"}, id="ZeRO-3, offloaded"),
        pytest.param({"fsdp": "full_shard"}, id="FSDP"),
    ],
)
@pytest.mark.usefixtures("built_ops")
def test_a_checkpoint_has_the_bytes_of_one_that_was_saved_synchronously(layout: dict[str, Any], tmp_path: Path) -> None:
    for asked in ("off", "on"):
        launch("torchrun", tmp_path / asked, {**SAVES, **layout, "async_save": asked}, ranks=2)
    for step in (2, 4):
        one, other = (content(tmp_path / asked / f"checkpoint-{step}") for asked in ("off", "on"))
        assert one.keys() == other.keys()
        assert [name for name in one if one[name] != other[name]] == []
        assert problems(tmp_path / "on" / f"checkpoint-{step}", hashes=True) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "pipelines"), [(2, 1), (2, 2), (1, 2)])
@pytest.mark.usefixtures("built_ops")
def test_so_has_one_of_a_pipeline(stages: int, pipelines: int, tmp_path: Path) -> None:
    values = {**PIPED, "pipeline_parallel_size": stages}
    for asked in ("off", "on"):
        every = {**values, "async_save": asked}
        launch("torchrun", tmp_path / asked, every, ranks=stages * pipelines, recipe=PIPELINE)
    for step in (2, 4):
        one, other = (content(tmp_path / asked / f"checkpoint-{step}") for asked in ("off", "on"))
        assert one.keys() == other.keys()
        assert [name for name in one if one[name] != other[name]] == []
        assert problems(tmp_path / "on" / f"checkpoint-{step}", hashes=True) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("happens", "said"), [("kill", "was killed by SIGKILL"), ("full", "File too large")])
@pytest.mark.usefixtures("built_ops")
def test_a_pipeline_whose_writer_fails_saves_again_and_goes_on(happens: str, said: str, tmp_path: Path) -> None:
    values = {**PIPED, "save_steps": 4, "max_steps": 12, "async_save": "on"}
    run = launch("torchrun", tmp_path / "run", values, ranks=2, recipe=HELD_UP, env={"HAPPENS": happens}, check=False)
    assert run.status == 0, run.output[-3000:]
    assert re.search(f"checkpoint-8 is not saved: .*{said}.* save again", run.output), run.output[-3000:]
    assert run.output.count("note: checkpoint-8 could not be saved: ") == 1
    whole = checkpoints_in(run.folder)
    assert [path.name for path in whole] in [["checkpoint-12", f"checkpoint-{again}"] for again in (10, 11)]
    assert [problems(path, hashes=True) for path in whole] == [[], []]


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_a_save_for_which_one_rank_lacks_memory_is_synchronous_on_all(tmp_path: Path) -> None:
    for asked in ("off", "on"):
        every = {**PIPED, "async_save": asked}
        run = launch("torchrun", tmp_path / asked, every, ranks=2, recipe=HELD_UP, env={"HAPPENS": "lack"})
    assert run.output.count("note: checkpoint-2 is saved synchronously, because rank 1 lacks it.") == 1
    assert run.output.count("synchronous") == 1
    for step in (2, 4):
        one, other = (content(tmp_path / asked / f"checkpoint-{step}") for asked in ("off", "on"))
        assert one.keys() == other.keys()
        assert [name for name in one if one[name] != other[name]] == []


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_a_checkpoint_that_one_stage_cannot_read_ends_both_with_one_message(tmp_path: Path) -> None:
    values = {**PIPED, "max_steps": 2}
    launch("torchrun", tmp_path / "run", values, ranks=2, recipe=PIPELINE)
    resumed = {**values, "max_steps": 4, "resume": "auto"}
    run = launch("torchrun", tmp_path / "run", resumed, ranks=2, recipe=HELD_UP, env={"HAPPENS": "unread"}, check=False)
    assert run.status == 1
    (said,) = run.errors
    assert re.search("rank 1 could not read .*checkpoint-2: .*Input/output error", said), run.output[-3000:]


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "values"), [(RECIPE, SAVES), (PIPELINE, PIPED)])
@pytest.mark.usefixtures("built_ops")
def test_a_signal_is_heeded_by_a_checkpoint_that_is_there_when_the_run_ends(
    recipe: str, values: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    endless = {**values, "max_steps": 4000, "save_steps": 3, "async_save": "on", "output_dir": folder}
    command = [*LAUNCHERS["torchrun"](2), recipe, *flags(endless)]
    with living(command, recipe, tmp_path / "log") as run:
        run.wait_for(lambda: checkpoints_in(folder))
        run.ranks()[1].send_signal(signal.SIGTERM)
        run.end()
    newest = checkpoints_in(folder)[0]
    assert f"{newest.name} is saved; --resume auto continues from it" in run.output
    assert problems(newest, hashes=True) == []
    assert list(folder.glob("unfinished-*")) == []
    step = int(newest.name.rpartition("-")[2])
    resumed = flags({**endless, "max_steps": step + 1, "resume": "auto"})
    status, output = run_to_its_end([*LAUNCHERS["torchrun"](2), recipe, *resumed])
    assert status == 0, output[-3000:]
