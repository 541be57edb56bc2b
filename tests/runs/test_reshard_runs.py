"""Runs that go on with another number of ranks, another ZeRO stage or another engine, against the run that was not cut:
real launches."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, Finished, gate_has, launch

from finetune.training.checkpoints.manifest import problems

pytestmark = pytest.mark.usefixtures("built_ops")

FIRST, SECOND, LAST = 4, 8, 14  # steps: two checkpoints, and the end, six steps after the second
GLOBAL_BATCH, MICRO_BATCH = 16, 2
TINY = {
    "config_overrides": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=64",
    "max_steps": LAST,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": FIRST,
    "save_total_limit": 10,
    "do_eval": False,
    "bf16": False,
    "learning_rate": 3e-3,  # at a higher one runs drift apart by rounding alone
    "warmup_steps": 2,  # the rate of every step is another
    "weight_decay": 0.1,  # biases and norms have none, so that the groups differ
    "sample_tokens": 0,
    "max_train_samples": 60,
    "per_device_train_batch_size": MICRO_BATCH,
}
SAME = 1e-5  # relative, of losses and gradient norms in fp32


@dataclass(frozen=True)
class Plan:
    """A run into `folder` by `engine`: a DeepSpeed config, none, or pipeP for P stages. With `source` it goes on from
    that checkpoint."""

    folder: Path
    engine: str
    source: Path | None = None
    more: tuple[tuple[str, Any], ...] = ()

    def run(self, ranks: int) -> Finished:
        """To its end; one that goes on finds the checkpoint in a folder of its own."""
        if self.source is not None:
            shutil.copytree(self.source, self.folder / self.source.name)
            shutil.copy(self.source.parent / "recipe.yaml", self.folder)
        values: dict[str, Any] = dict(TINY)
        stages = int(self.engine.removeprefix("pipe")) if self.engine.startswith("pipe") else 0
        recipe = "recipes/causal_lm_pipeline.py" if stages else "recipes/causal_lm.py"
        if stages or self.engine == "fsdp":
            values |= {"pipeline_parallel_size": stages} if stages else {"fsdp": True}
        else:
            values["deepspeed"] = self.engine
        if self.source is None:
            values["gradient_accumulation_steps"] = GLOBAL_BATCH * max(1, stages) // (MICRO_BATCH * ranks)
        else:
            values["resume"] = "auto"  # and the accumulation is for the toolkit to find
        return launch("torchrun", self.folder, values | dict(self.more), ranks=ranks, recipe=recipe)


def run_all(ranks: int, plans: Sequence[Plan]) -> dict[str, Finished]:
    """By the names of their folders."""
    return {plan.folder.name: plan.run(ranks) for plan in plans}


def deviation(run: Finished, truth: Finished, after: int) -> float:
    """The largest relative one of losses and gradient norms, over all steps after `after`."""
    expected = {row["step"]: row for row in truth.steps}
    rows = [row for row in run.steps if row["step"] > after]
    assert [row["step"] for row in rows] == list(range(after + 1, LAST + 1))
    return max(abs(row[name] / expected[row["step"]][name] - 1) for row in rows for name in ("loss", "grad_norm"))


def assert_moved(run: Finished, source: str) -> None:
    assert re.search(rf"^resume: {source} was written by .*, this run has ", run.output, re.MULTILINE), run.output
    assert not list(run.folder.glob("unfinished-*"))
    assert problems(run.folder / source, hashes=True) == []  # untouched


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("uncut")
    return run_all(2, [Plan(folder / name, name) for name in ("zero3", "none", "pipe2", "fsdp")])


def first(run: Finished) -> Path:
    return run.folder / f"checkpoint-{FIRST}"


@pytest.fixture(scope="module")
def on_one(uncut: dict[str, Finished], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each of another engine or stage, on one rank."""
    folder = tmp_path_factory.mktemp("one")
    moves = {
        "3to1": ("zero3", "zero1"),
        "ddp": ("none", "zero3"),
        "cpu": ("zero3", "zero2_offload"),  # whose decay must be AdamW's
        "off": ("pipe2", "zero2"),
        "on": ("zero3", "pipe1"),
        "sharded": ("fsdp", "zero1"),
    }
    return run_all(1, [Plan(folder / name, to, first(uncut[of])) for name, (of, to) in moves.items()])


@pytest.mark.parametrize("name", ["3to1", "ddp", "cpu", "off", "on", "sharded"])
def test_a_run_of_two_ranks_goes_on_alone_by_another_engine_as_if_not_cut(
    name: str, uncut: dict[str, Finished], on_one: dict[str, Finished]
) -> None:
    run = on_one[name]
    assert deviation(run, uncut["zero3"], FIRST) < SAME
    assert_moved(run, f"checkpoint-{FIRST}")
    assert f"global batch {MICRO_BATCH} x 8 x 1 = {GLOBAL_BATCH}" in run.output
    if name != "on":  # 8 is what the pipeline's recipe would do unasked
        assert f"instead of 1, to keep the global batch: {MICRO_BATCH} x 8 x 1 = {GLOBAL_BATCH}" in run.output


def test_and_goes_back_to_two_ranks(uncut: dict[str, Finished], on_one: dict[str, Finished], tmp_path: Path) -> None:
    source = on_one["3to1"].folder / f"checkpoint-{SECOND}"
    run = run_all(2, [Plan(tmp_path / "back", "zero2", source)])["back"]
    assert deviation(run, uncut["zero3"], SECOND) < SAME
    assert_moved(run, source.name)


@pytest.mark.parametrize("source", ["zero3", "pipe2"])
def test_fsdp_goes_on_from_another_engine_as_if_not_cut(
    source: str, uncut: dict[str, Finished], tmp_path: Path
) -> None:
    run = run_all(2, [Plan(tmp_path / "fsdp", "fsdp", first(uncut[source]))])["fsdp"]
    assert deviation(run, uncut["zero3"], FIRST) < SAME
    assert_moved(run, f"checkpoint-{FIRST}")


@pytest.mark.parametrize(("source", "to"), gate_has(("zero3", "none"), [("zero3", "none"), ("none", "zero2")]))
def test_an_adapter_goes_on_by_another_engine_as_if_not_cut(
    source: str, to: str, uncut: dict[str, Finished], tmp_path: Path
) -> None:
    """From two ranks to one; the head is trained in full."""
    lora = (
        *(("use_peft", True), ("lora_r", 4), ("model_name_or_path", uncut["none"].folder)),
        *(("lora_modules_to_save", ["lm_head", "tokens"]), ("lora_target_modules", ["qkv"])),
        *(("config_overrides", None), ("learning_rate", 1e-2)),
    )
    truth = Plan(tmp_path / "truth", source, None, lora).run(2)
    run = Plan(tmp_path / "moved", to, first(truth), lora).run(1)
    assert deviation(run, truth, FIRST) < SAME
    assert_moved(run, f"checkpoint-{FIRST}")


ENGINES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "none", "pipe2")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("every")
    return run_all(2, [Plan(folder / name, name) for name in ENGINES])


@pytest.mark.nightly
@pytest.mark.parametrize("to", [name for name in ENGINES if name != "pipe2"])
def test_every_layout_of_two_ranks_goes_on_by_every_other_on_one(
    to: str, every: dict[str, Finished], tmp_path: Path
) -> None:
    runs = run_all(1, [Plan(tmp_path / f"{of}-{to}", to, first(every[of])) for of in ENGINES])
    found = {name: deviation(run, every["zero2"], FIRST) for name, run in runs.items()}
    assert len(found) == len(ENGINES)
    assert max(found.values()) < SAME, found


@pytest.mark.nightly
@pytest.mark.parametrize("to", ["zero1", "zero3", "zero2_offload", "pipe2"])
def test_one_rank_goes_on_as_four(to: str, tmp_path: Path) -> None:
    alone = run_all(1, [Plan(tmp_path / "alone", "zero2")])["alone"]
    more = (("per_device_train_batch_size", MICRO_BATCH),)
    run = run_all(4, [Plan(tmp_path / "four", to, first(alone), more)])["four"]
    assert deviation(run, alone, FIRST) < SAME


@pytest.mark.nightly
@pytest.mark.usefixtures("built_async_io")
def test_states_on_nvme_go_on_in_memory_as_if_not_cut(tmp_path: Path) -> None:
    config = json.loads((REPO / "ds_configs" / "zero3_nvme.json").read_text())
    config["zero_optimization"]["offload_param"]["buffer_size"] = 2_000_000  # elements, pinned by each rank
    for what in ("optimizer", "param"):
        config["zero_optimization"][f"offload_{what}"]["nvme_path"] = str(tmp_path / "disk")
    (tmp_path / "nvme.json").write_text(json.dumps(config))
    # Smaller weights than 1 MiB on a rank are not swapped out.
    sizes = "num_hidden_layers=2,hidden_size=192,num_attention_heads=2,max_position_embeddings=64"
    more = (("config_overrides", sizes), ("max_train_samples", 60))
    uncut = Plan(tmp_path / "uncut", str(tmp_path / "nvme.json"), None, more).run(2)
    swapped = [path.name for path in first(uncut).glob("global_step*/offloaded_tensors/rank01/*.swp")]
    assert len(swapped) == 3, swapped  # of the weights that decay; biases and norms are too small
    for ranks, to in ((1, "zero2"), (2, "zero3")):
        run = Plan(tmp_path / to, to, first(uncut), more).run(ranks)
        assert deviation(run, uncut, FIRST) < SAME
        assert_moved(run, f"checkpoint-{FIRST}")


@pytest.mark.nightly
def test_bf16_goes_on_within_its_own_noise(tmp_path: Path) -> None:
    """The noise is what uncut runs of other layouts differ by, which add up in another order."""
    half = (("bf16", True),)
    uncut = run_all(2, [Plan(tmp_path / name, name, None, half) for name in ("zero2", "zero3")])
    alone = run_all(1, [Plan(tmp_path / "alone", "zero2", None, half)])["alone"]
    noise = max(deviation(run, alone, FIRST) for run in uncut.values())
    assert 0 < noise < 0.05
    moves = {"2to3": ("zero2", "zero3"), "3to2": ("zero3", "zero2")}
    runs = run_all(1, [Plan(tmp_path / name, to, first(uncut[of]), half) for name, (of, to) in moves.items()])
    for name, run in runs.items():
        assert deviation(run, uncut[moves[name][0]], FIRST) < 3 * noise


@pytest.mark.nightly
def test_the_best_checkpoint_of_another_layout_is_what_the_run_ends_with(tmp_path: Path) -> None:
    """The highest loss is called the best, so the first evaluation has it; the run is cut and goes on elsewhere."""
    more = (
        *(("do_eval", True), ("eval_strategy", "steps"), ("eval_steps", FIRST), ("max_eval_samples", 20)),
        *(("load_best_model_at_end", True), ("metric_for_best_model", "eval_loss"), ("greater_is_better", True)),
    )
    cut = run_all(2, [Plan(tmp_path / "cut", "zero2", None, more)])["cut"]
    best = Path(cut.json("trainer_state.json")["best_model_checkpoint"])
    assert best.name == f"checkpoint-{FIRST}"
    run = run_all(1, [Plan(tmp_path / "on", "zero3", first(cut), more)])["on"]
    rows = map(json.loads, (cut.folder / "metrics.jsonl").read_text().splitlines())
    expected = next(row["eval_loss"] for row in rows if "eval_loss" in row)
    assert run.json("eval_results.json")["eval_loss"] == pytest.approx(expected, rel=1e-5)
