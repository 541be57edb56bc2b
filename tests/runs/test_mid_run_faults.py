"""What fails in the midst of a run: a step that is not finite, memory, a data file, the clock."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import NOT_JUDGED, RECIPE, TINY, Finished, flags, gate_has, launch, run_to_its_end, tool
from test_interruption import PIPELINE, SMALL_PIPELINE

from finetune.run.files import FAILURE

FAULTY = "tests/runs/faulty.py"
SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 8, **NOT_JUDGED}
LANGUAGE = "recipes/causal_lm.py"
SMALL_LANGUAGE = {
    "config_overrides": "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,max_position_embeddings=32",
    "max_train_samples": 4000,
    "sample_tokens": 0,
    "max_steps": 12,
    "logging_steps": 1,
    "eval_strategy": "no",
    "bf16": False,
    "do_eval": False,
}


def faulty(
    launcher: str, folder: Path, values: dict[str, Any], fault: dict[str, Any], recipe: str = RECIPE, status: int = 0
) -> Finished:
    ranks = 1 if launcher == "python" else 2
    env = {"FAULT": json.dumps({**fault, "recipe": recipe})}
    run = launch(launcher, folder, values, ranks=ranks, env=env, recipe=FAULTY, check=False)
    assert run.status == status, run.output[-4000:]
    return run


NAN = {"kind": "nan", "rank": 0, "batch": 4}  # of the third step: every batch is looked up in two embeddings


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One process that leaves the third step out."""
    folder = tmp_path_factory.mktemp("nan") / "run"
    values = {**TINY, **SAVES, "per_device_train_batch_size": 16, "on_nan": "skip"}
    return faulty("python", folder, values, NAN)


def test_a_step_that_is_not_finite_is_explained_and_changes_nothing(skipped: Finished) -> None:
    from safetensors.numpy import load_file

    before, after = (load_file(skipped.folder / f"checkpoint-{step}" / "model.safetensors") for step in (2, 3))
    assert all((before[name] == after[name]).all() for name in before)
    assert [row["loss"] is None for row in skipped.steps] == [False, False, True, False, False, False]
    assert [row.get("nonfinite_steps", 0) for row in skipped.steps] == [0, 0, 1, 1, 1, 1]
    report = json.loads((skipped.folder / "_nan/step-3/report.json").read_text())
    assert "the output of distilbert.embeddings.word_embeddings (Embedding)" in report["said"]
    (one,) = report["micro_batches"]
    assert len(one["samples"]) == 16
    assert (skipped.folder / "_nan/step-3/rank-0.safetensors").is_file()


def test_the_documented_command_runs_the_kept_batch_again(skipped: Finished) -> None:
    command = [tool("python"), "-m", "finetune.training.guards.replay"]
    command += [str(skipped.folder / "_nan/step-3"), str(skipped.folder / "checkpoint-2")]
    status, output = run_to_its_end([*command, "--model_class", "AutoModelForSequenceClassification"])
    assert status == 0, output[-3000:]
    assert re.search(r"rank-0\n  micro-batch 1: loss \d+\.\d+; all is finite", output), "the fault was a hook's"


def test_a_step_of_pairs_is_explained_and_its_batch_kept(tmp_path: Path) -> None:
    """The gradients of a batch of pairs are computed ahead of its backward pass, from all micro-batches of a step."""
    from safetensors.numpy import load_file

    values = {**TINY, **NOT_JUDGED, "max_steps": 3, "per_device_train_batch_size": 8, "on_nan": "skip"}
    values["gradient_accumulation_steps"] = 2
    fault = {**NAN, "batch": 7}  # two texts of each of two micro-batches are looked up
    run = faulty("python", tmp_path / "run", values, fault, "recipes/embedding.py")
    said = "warning: step 2 is not finite: first the output of embeddings.word_embeddings (Embedding)"
    assert said in run.output, run.output[-3000:]
    assert [row["loss"] is None for row in run.steps] == [False, True, False]
    batch = load_file(run.folder / "_nan/step-2/rank-0.safetensors")
    assert {"0.input_ids", "1.input_ids", "1.attention_mask", "1.keys", "1.labels", "rng.cpu"} <= batch.keys()


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    """Of all stages, to the bit."""
    from safetensors.numpy import load_file

    files = sorted(checkpoint.glob("model*.safetensors"))
    assert files
    return {name: value.tobytes() for file in files for name, value in load_file(file).items()}


LAYOUTS = [
    pytest.param("torchrun", {}, id="DDP"),
    *(pytest.param("torchrun", {"deepspeed": f"zero{s}"}, id=f"ZeRO-{s}") for s in (2, 3)),
    *(pytest.param("torchrun", {"deepspeed": f"zero{s}"}, id=f"ZeRO-{s}", marks=pytest.mark.nightly) for s in (0, 1)),
    pytest.param("torchrun", {"deepspeed": "zero3_offload"}, id="ZeRO-3 offload", marks=pytest.mark.nightly),
    pytest.param("torchrun", {"fsdp": "full_shard"}, id="FSDP", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("launcher", "values"), LAYOUTS)
@pytest.mark.usefixtures("built_ops")
def test_the_same_step_is_left_out_in_every_layout(
    launcher: str, values: dict[str, Any], skipped: Finished, tmp_path: Path
) -> None:
    every = {**TINY, "per_device_train_batch_size": 8, "on_nan": "skip", **NOT_JUDGED, **values}
    run = faulty(launcher, tmp_path / "run", every, NAN)
    assert run.output.count("warning: step 3 is not finite: first the output of") == 1, run.output[-3000:]
    assert run.steps[2]["loss"] is None
    rest = [row["loss"] for row in run.steps if row["loss"] is not None]
    assert rest == pytest.approx([row["loss"] for row in skipped.steps if row["loss"] is not None], rel=1e-4)
    assert run.column("learning_rate") == pytest.approx(skipped.column("learning_rate"))


@pytest.mark.parametrize("stage", gate_has(2, [2, 3]))
@pytest.mark.usefixtures("built_ops")
def test_under_deepspeed_weights_are_a_checkpoints_again(stage: int, tmp_path: Path) -> None:
    """The last step fails, and what the third had changed since the checkpoint is undone."""
    values = {**TINY, **SAVES, "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 8}
    values |= {"on_nan": "rollback", "deepspeed": f"zero{stage}"}
    run = faulty("torchrun", tmp_path / "run", values, {**NAN, "batch": 5})
    assert "weights and optimizer are those of checkpoint-2 again" in run.output, run.output[-3000:]
    assert weights_of(run.folder) == weights_of(run.folder / "checkpoint-2")


POLICIES = [("skip", "nan"), ("skip", "gradient"), ("rollback", "nan"), ("rollback", "gradient")]


@pytest.mark.parametrize(("policy", "kind"), gate_has(("rollback", "nan"), POLICIES))
def test_a_pipeline_leaves_the_step_out_on_all_its_stages(policy: str, kind: str, tmp_path: Path) -> None:
    values = {**SMALL_PIPELINE, **SAVES, "save_steps": 2, "max_steps": 6, "gradient_accumulation_steps": 2}
    fault = {**NAN, "kind": kind, "batch": 14}
    run = faulty("torchrun", tmp_path / "run", {**values, "on_nan": policy}, fault, PIPELINE)
    assert run.output.count("step 4 is not finite: first") == 1, run.output[-3000:]
    assert all(row["loss"] is not None for row in run.steps[-2:])
    names = sorted(path.name for path in run.folder.glob("checkpoint-*"))
    if policy == "rollback":  # what was gone back to is not saved again: it may fail again
        assert names == ["checkpoint-2", "checkpoint-6"]
        assert "checkpoint-2" in run.output[run.output.index("step 4 is not finite") :]
    else:
        assert names == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert weights_of(run.folder / "checkpoint-2") != weights_of(run.folder / "checkpoint-4")


@pytest.mark.nightly
def test_a_step_that_a_pipeline_leaves_out_adds_nothing_to_the_load_of_experts(tmp_path: Path) -> None:
    """Of the last two steps the last is left out."""
    values = {**SMALL_PIPELINE, "max_steps": 4, "logging_steps": 2, "gradient_accumulation_steps": 2, "on_nan": "skip"}
    values |= {"per_device_train_batch_size": 4, "block_size": 32, "save_strategy": "no", "do_eval": False}
    values |= {"config_overrides": "num_experts=4,num_experts_per_tok=2,num_hidden_layers=2"}
    run = faulty("torchrun", tmp_path / "run", values, {**NAN, "kind": "gradient", "batch": 14}, PIPELINE)
    assert "step 4 is not finite" in run.output
    assert [sum(layer) for layer in run.json("experts.json")["tokens"]] == [2 * 4 * 32 * 2] * 2


def test_stop_ends_the_run_before_the_step_and_a_run_that_skips_goes_past_it(tmp_path: Path) -> None:
    values = {**TINY, **SAVES, "lr_scheduler_type": "constant"}
    fault = {**NAN, "kind": "gradient"}
    run = faulty("python", tmp_path / "run", values, fault, status=1)
    (said,) = run.errors
    assert said.startswith("step 3 is not finite: first the gradient of distilbert.embeddings.word_embeddings")
    names = sorted(path.name for path in run.folder.glob("checkpoint-*"))
    assert names == ["checkpoint-1", "checkpoint-2"]
    assert json.loads((run.folder / FAILURE).read_text()) == {"rank": 0, "error": said}
    resumed = launch("python", run.folder, {**values, "resume": "auto", "on_nan": "skip"})
    assert [row["step"] for row in resumed.steps] == [1, 2, 3, 4, 5, 6]
    assert not (run.folder / FAILURE).exists()


def test_no_more_memory_is_told_with_the_plan_and_the_cheapest_changes(tmp_path: Path) -> None:
    most = 6 * 2**30  # of address space, most of which torch and its libraries take
    values = {"output_dir": tmp_path / "run", "max_steps": 1, "eval_strategy": "no", "overwrite_output_dir": True}
    limited = ["prlimit", f"--as={most}", tool("python"), LANGUAGE, *flags(values)]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    status, output = run_to_its_end([*limited, "--per_device_train_batch_size", "4096"], env)
    assert status == 1, output[-3000:]
    (said,) = Finished(status, output, tmp_path / "run").errors
    assert "out of memory on rank 0" in said
    assert f"limited to {most / 2**30:.2f} GiB" in said
    assert re.search(
        r"there is room for [0-2]\.\d+\. This would fit:\n  --deepspeed \w+ --per_device_train_batch_size \d+ .*: "
        r"[0-2]\.\d+ GiB, [\d.]+ times the time per sample\n",
        output,
    ), output
    advised = re.findall(r"^  (--.*): \d", output, re.MULTILINE)
    (shown,) = re.findall(r"^`finetune (plan .*)` shows", output, re.MULTILINE)
    assert advised
    for words in advised:
        status, found = run_to_its_end([tool("finetune"), *shown.split(), *words.split(), "--no_search"], env)
        assert "It fits" in found, found
        status, found = run_to_its_end([*limited, *words.split()], env)
        assert status == 0, found[-3000:]
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != most


@pytest.mark.parametrize("recipe", [LANGUAGE, PIPELINE])
def test_a_mapped_file_that_is_cut_off_in_mid_run_is_named(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    last_of_a_step = 24 if recipe == PIPELINE else 5  # files are looked at before each step
    fault = {"kind": "cut", "rank": 0, "batch": last_of_a_step, "file": "train-0/tokens.bin"}
    values = {**SMALL_LANGUAGE, "save_strategy": "steps", "save_steps": 2}
    values |= {"pipeline_parallel_size": 1, "schedule_step": 0} if recipe == PIPELINE else {}
    run = faulty("python", tmp_path / "run", values, fault, recipe, status=1)
    (said,) = run.errors
    assert "tokens.bin has changed since the run began to read it" in said
    (cut,) = (file for file in (tmp_path / "cache").rglob("train-0/tokens.bin") if file.stat().st_size == 4096)
    shutil.rmtree(cut.parent.parent)  # as the message says: it is made anew
    resumed = launch("python", run.folder, {**values, "resume": "auto"}, recipe=recipe)
    assert [row["step"] for row in resumed.steps] == list(range(1, 13))


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [RECIPE, PIPELINE])
def test_a_clock_that_is_set_back_spoils_no_figure(recipe: str, tmp_path: Path) -> None:
    values = TINY if recipe == RECIPE else {**SMALL_PIPELINE, "pipeline_parallel_size": 1, "max_steps": 6}
    run = faulty("python", tmp_path / "run", values, {"kind": "clock", "rank": 0, "batch": 3}, recipe)
    results = run.json("train_results.json")
    assert 0 < results["train_runtime"] < 300
    assert results["train_samples_per_second"] > 0


@pytest.mark.nightly
def test_damage_to_any_kind_of_file_is_detected_and_the_previous_checkpoint_is_used() -> None:
    status, output = run_to_its_end([tool("python"), "benchmarks/corruption.py", "--layouts", "ddp", "pipeline"])
    assert status == 0, output[-3000:]
    detected = re.findall(r"(\d+) of (\d+) \|$", output, re.MULTILINE) + re.findall(r"(\d+) of (\d+) detected", output)
    assert len(detected) == 3, output[-3000:]  # two layouts and all
    assert all(int(found) == int(tried) > 0 for found, tried in detected), output[-3000:]
