"""Real runs that are killed while they save, that meet a full disk, and that go on from what is whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LAUNCHERS, RECIPE, TINY, flags, launch, run_to_its_end, tool
from living import Living, living
from test_interruption import PIPELINE, SMALL_PIPELINE

from finetune.training.checkpoints.manifest import Layout, checkpoints_in, problems, read_manifest

SAVES = {**TINY, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "lr_scheduler_type": "constant"}


def kill_in_a_save(run: Living, folder: Path, step: int) -> None:
    """All ranks at once, as soon as the checkpoint of `step` or a later one is begun."""
    begun: list[Path] = []
    while not begun:
        assert run.process.poll() is None, run.output[-3000:]
        begun = [p for p in folder.glob("unfinished-checkpoint-*") if int(p.name.rpartition("-")[2]) >= step]
        time.sleep(0.001)
    for process in run.ranks().values():
        process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "values"),
    [
        pytest.param("python", {}, id="alone"),
        pytest.param("torchrun", {"deepspeed": "zero3"}, id="ZeRO-3"),
        pytest.param("torchrun", {"fsdp": "full_shard"}, id="FSDP"),
    ],
)
@pytest.mark.usefixtures("built_ops")
def test_a_run_that_is_killed_while_it_saves_goes_on_from_what_is_whole(
    launcher: str, values: dict[str, Any], tmp_path: Path
) -> None:
    folder, ranks = tmp_path / "run", 1 if launcher == "python" else 2
    every = {**SAVES, **values, "max_steps": 4000}
    command = [*LAUNCHERS[launcher](ranks), RECIPE, *flags({"output_dir": folder, **every})]
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: checkpoints_in(folder))
        overwrites = flags({"output_dir": folder, **SAVES, "overwrite_output_dir": True})
        second = run_to_its_end([sys.executable, RECIPE, *overwrites])
        kill_in_a_save(run, folder, 3)
        run.end()
    pid = re.search(
        r"another run writes there \(process (\d+) on .*, started 20\d\d-.*: .*recipes/seq_cls\.py ", second[1]
    )
    assert second[0] == 2, second[1][-2000:]
    assert pid, second[1][-2000:]
    there = checkpoints_in(folder)
    assert there
    for checkpoint in there:
        assert problems(checkpoint, hashes=True) == []
    last = read_manifest(there[0])
    assert last.global_batch_size == 16 * ranks
    resumed = launch(launcher, folder, {**every, "max_steps": last.step + 2, "resume": "auto"}, ranks=ranks)
    assert [row["step"] for row in resumed.steps] == list(range(1, last.step + 3))
    assert [path.name for path in checkpoints_in(folder)] == [f"checkpoint-{last.step + i}" for i in (2, 1)]
    assert not list(folder.glob("unfinished-*")) + list(folder.glob("deleting-*"))
    assert (folder / "latest").read_text() == f"checkpoint-{last.step + 2}\n"
    verify = subprocess.run([tool("finetune"), "checkpoint", "verify", folder], capture_output=True, text=True)
    assert (verify.returncode, verify.stdout.count(": verified (")) == (0, 2), verify.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """40 MiB: room for two checkpoints, of ZeRO-2 of 14 MiB, and for the final model of 3 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here: that takes root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.nightly
@pytest.mark.parametrize("values", [{}, {"deepspeed": "zero2"}], ids=["DDP", "ZeRO-2"])
@pytest.mark.usefixtures("built_ops")
def test_a_full_disk_ends_all_ranks_with_one_message_and_the_earlier_checkpoint(
    values: dict[str, Any], small_disk: Path, tmp_path: Path
) -> None:
    folder = small_disk / "run"
    filler = small_disk / "filler"
    every = {**SAVES, **values, "save_steps": 300, "max_steps": 4000, "save_total_limit": 3}
    command = [*LAUNCHERS["torchrun"](2), RECIPE, *flags({"output_dir": folder, **every})]
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: checkpoints_in(folder))
        filler.write_bytes(b"\0" * (shutil.disk_usage(small_disk).free - 4 * 2**20))
        assert run.end() == 1
        said = run.output
    assert len(re.findall(r"^(?:\[rank \d+\] )?error: ", said, re.MULTILINE)) == 1, said[-4000:]
    assert "needs about" in said or "is full" in said
    whole = checkpoints_in(folder)[0]
    assert problems(whole, hashes=True) == []
    filler.unlink()
    step = read_manifest(whole).step
    resumed = launch("torchrun", folder, {**every, "max_steps": step + 1, "resume": "auto"}, ranks=2)
    assert resumed.steps[-1]["step"] == step + 1


@pytest.mark.nightly
def test_a_disk_that_becomes_read_only_ends_all_ranks_with_one_message(small_disk: Path, tmp_path: Path) -> None:
    folder = small_disk / "run"
    values = {**SAVES, "max_steps": 4000, "save_total_limit": 1}
    command = [*LAUNCHERS["torchrun"](2), RECIPE, *flags({"output_dir": folder, **values})]
    with living(command, RECIPE, tmp_path / "log") as run:
        run.wait_for(lambda: checkpoints_in(folder))
        # A second mount over the same folder, for the lock keeps the first one from becoming read-only.
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        try:
            frozen = False
            while not frozen:  # busy while a file of this mount is open for writing
                frozen = subprocess.run(["mount", "-o", "remount,bind,ro", folder], capture_output=True).returncode == 0
            assert run.end() == 1
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
        said = run.output
    assert len(re.findall(r"^(?:\[rank \d+\] )?error: ", said, re.MULTILINE)) == 1, said[-4000:]
    assert "Read-only file system" in said
    assert 'recipes/seq_cls.py", line' not in said  # a traceback of ours; torchrun adds one of its own
    assert problems(checkpoints_in(folder)[0], hashes=True) == []


@pytest.mark.usefixtures("built_ops")
def test_each_layout_is_named_in_the_manifest_and_a_flipped_bit_sends_a_run_to_the_one_before(tmp_path: Path) -> None:
    values = {**SAVES, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    folder = tmp_path / "zero3"
    launch("deepspeed", folder, {**values, "deepspeed": "zero3", "save_total_limit": 3}, ranks=2)
    newest = checkpoints_in(folder)[0]
    assert read_manifest(newest).layout == Layout("deepspeed", 2, zero_stage=3)
    shard = next(newest.glob("global_step2/*optim_states.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    more = {**values, "deepspeed": "zero3", "max_steps": 3, "resume": "auto"}
    run = launch("deepspeed", folder, more, ranks=2)
    assert (
        run.output.count(
            f"warning: a checkpoint is skipped: checkpoint-2/global_step2/{shard.name} has changed since it was saved"
        )
        == 1
    )
    assert [row["step"] for row in run.steps] == [1, 2, 3]
    assert run.json("checkpoint-3/trainer_state.json")["best_model_checkpoint"] in {
        str(folder / f"checkpoint-{step}") for step in (1, 2, 3)
    }
    for checkpoint in checkpoints_in(folder):
        assert problems(checkpoint, hashes=True) == []
    run = launch(
        "torchrun", tmp_path / "fsdp", {**values, "load_best_model_at_end": False, "fsdp": "full_shard"}, ranks=2
    )
    assert read_manifest(run.folder / "checkpoint-2").layout == Layout("fsdp", 2)


@pytest.mark.nightly
@pytest.mark.usefixtures("built_ops")
def test_a_stage_of_a_pipeline_that_is_killed_while_it_saves_leaves_no_torn_checkpoint(tmp_path: Path) -> None:
    recipe, folder = PIPELINE, tmp_path / "run"
    values = {
        **SMALL_PIPELINE,
        "config_overrides": "num_hidden_layers=2,hidden_size=64,num_attention_heads=2,max_position_embeddings=32",
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "lr_scheduler_type": "constant",
    }
    command = [*LAUNCHERS["deepspeed"](2), recipe, *flags({"output_dir": folder, **values, "max_steps": 4000})]
    with living(command, recipe, tmp_path / "log") as run:
        run.wait_for(lambda: checkpoints_in(folder))
        while not list(folder.glob("unfinished-checkpoint-*")):
            time.sleep(0.001)
        run.ranks()[1].send_signal(signal.SIGKILL)
        assert run.end() != 0
        assert "rank 1 (stage 1 of 2) was killed" in run.output
    for checkpoint in checkpoints_in(folder):
        assert problems(checkpoint, hashes=True) == []
    manifest = read_manifest(checkpoints_in(folder)[0])
    assert (manifest.layout.engine, manifest.layout.stages, manifest.layout.pipelines) == ("pipeline", 2, 1)
    more = {**values, "max_steps": manifest.step + 1, "resume": "auto"}
    resumed = launch("deepspeed", folder, more, ranks=2, recipe=recipe)
    assert [row["step"] for row in resumed.steps] == list(range(1, manifest.step + 2))
