"""--teacher by real launches: the same loss everywhere, teachers that cannot teach, resumption, adapters."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY as TINY_CLASSIFIER
from conftest import Finished, engine, gate_has, launch

pytestmark = pytest.mark.usefixtures("built_ops")

TINY = {
    "config_overrides": "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,max_position_embeddings=64",
    "max_steps": 4,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "bf16": False,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "sample_tokens": 0,
    "packing": "none",
}
FIGURES = ("loss", "hard_loss", "kl", "grad_norm")


def train(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    every = {**TINY, **values}
    if "model_name_or_path" in values:  # which has its own shape
        del every["config_overrides"]
    return launch(launcher, folder, every, recipe="recipes/causal_lm.py", **more)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 2 to 60 letters, one a row: micro-batches have very different numbers of tokens."""
    path, draw = tmp_path_factory.mktemp("uneven") / "a.jsonl", random.Random(0)
    rows = ["".join(draw.choices("abcdefgh ", k=draw.choice([2, 5, 20, 60]))) for _ in range(120)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def teacher(uneven: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    wide = TINY["config_overrides"].replace("hidden_size=32", "hidden_size=48")  # type: ignore[attr-defined]
    return train("python", tmp_path_factory.mktemp("teacher") / "run", {"train_file": uneven, "config_overrides": wide})


@pytest.fixture(scope="module")
def taught(uneven: Path, teacher: Finished) -> dict[str, Any]:
    return {"train_file": uneven, "tokenizer_name": teacher.folder, "teacher": teacher.folder}


@pytest.fixture(scope="module")
def one_process(taught: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    values = {**taught, "per_device_train_batch_size": 8, "save_strategy": "steps", "save_steps": 2}
    return train("python", tmp_path_factory.mktemp("truth") / "run", values)


def assert_same(run: Finished, truth: Finished, rel: float = 1e-3) -> None:
    for name in FIGURES:
        assert len(run.column(name)) == len(truth.column(name)) > 0
        assert run.column(name) == pytest.approx(truth.column(name), rel=rel, abs=1e-5)


LAYOUTS = [
    (config, batch, accumulation, chunk)
    for config in ("none", "zero2", "zero3", "fsdp")
    for batch, accumulation in ((4, 1), (2, 2))
    for chunk in (0, 16)
]


@pytest.mark.parametrize(
    ("config", "batch", "accumulation", "chunk"), gate_has([("none", 2, 2, 0), ("zero3", 4, 1, 16)], LAYOUTS)
)
def test_two_ranks_learn_from_a_teacher_what_one_learns(
    config: str,
    batch: int,
    accumulation: int,
    chunk: int,
    taught: dict[str, Any],
    one_process: Finished,
    tmp_path: Path,
) -> None:
    spread = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    run = train(
        "torchrun", tmp_path / "run", {**taught, **engine(config), **spread, "loss_chunk_tokens": chunk}, ranks=2
    )
    assert_same(run, one_process)


def test_the_loss_is_both_parts_and_the_card_names_the_teacher(one_process: Finished) -> None:
    assert min(one_process.column("kl")) > 0
    for step in one_process.steps:
        assert step["loss"] == pytest.approx(0.5 * step["hard_loss"] + 0.5 * 4 * step["kl"], rel=1e-4)
    assert "Distilled from" in (one_process.folder / "README.md").read_text()


def test_an_alpha_of_0_is_the_run_without_a_teacher_bit_by_bit(taught: dict[str, Any], tmp_path: Path) -> None:
    without = {name: value for name, value in taught.items() if name != "teacher"}
    plain = train("python", tmp_path / "plain", without)
    run = train("python", tmp_path / "run", {**taught, "distill_alpha": 0})
    assert "the teacher has no effect" in run.output
    assert run.column("loss") == plain.column("loss")
    weights = [(one.folder / "model.safetensors").read_bytes() for one in (plain, run)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("chunk", [0, 16])
def test_an_adapter_begins_where_its_teacher_is(chunk: int, uneven: Path, teacher: Finished, tmp_path: Path) -> None:
    values = {"train_file": uneven, "model_name_or_path": teacher.folder, "teacher": teacher.folder, "use_peft": True}
    run = train("python", tmp_path / "run", {**values, "loss_chunk_tokens": chunk, "distill_alpha": 1.0})
    assert run.column("kl")[0] == pytest.approx(0, abs=1e-6)
    assert run.column("loss")[0] == pytest.approx(0, abs=1e-5)


def test_a_run_goes_on_with_its_teacher_bit_by_bit_and_with_no_other(
    taught: dict[str, Any], one_process: Finished, tmp_path: Path
) -> None:
    shutil.copytree(one_process.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    copied = shutil.copytree(taught["teacher"], tmp_path / "teacher", ignore=shutil.ignore_patterns("checkpoint*"))
    values = {**taught, "per_device_train_batch_size": 8, "resume": "auto"}
    other = train("python", tmp_path / "run", {**values, "teacher": one_process.folder}, check=False)
    assert other.status == 2
    assert "learnt from another --teacher" in other.output
    again = train("python", tmp_path / "run", {**values, "teacher": copied})
    for name in FIGURES:
        assert again.column(name)[-2:] == one_process.column(name)[-2:]


def kept(taught: dict[str, Any], k: int | None = None) -> dict[str, Any]:
    """Flags by which so many tokens of the teacher are kept, or all."""
    shape = json.loads((taught["teacher"] / "config.json").read_text())
    return {**taught, "teacher_top_k": k or shape["vocab_size"]}


@pytest.fixture(scope="module")
def one_without(taught: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    values = {**kept(taught, 4), "per_device_train_batch_size": 8, "save_strategy": "steps", "save_steps": 2}
    return train("python", tmp_path_factory.mktemp("kept") / "run", values)


@pytest.mark.parametrize("chunk", [0, 16])
def test_all_that_a_teacher_said_before_teaches_what_it_says(
    chunk: int, taught: dict[str, Any], one_process: Finished, tmp_path: Path
) -> None:
    flags = {"per_device_train_batch_size": 8, "loss_chunk_tokens": chunk}
    run = train("python", tmp_path / "run", {**kept(taught), **flags})
    assert_same(run, one_process, rel=1e-6 if chunk == 0 else 1e-5)


@pytest.mark.parametrize(("config", "batch", "accumulation", "chunk"), gate_has([("zero3", 4, 1, 16)], LAYOUTS))
def test_two_ranks_learn_without_their_teacher_what_one_learns(
    config: str,
    batch: int,
    accumulation: int,
    chunk: int,
    taught: dict[str, Any],
    one_without: Finished,
    tmp_path: Path,
) -> None:
    spread = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    values = {**kept(taught, 4), **engine(config), **spread, "loss_chunk_tokens": chunk}
    own = {"FINETUNE_CACHE": str(tmp_path / "cache")}  # two ranks ask, too
    run = train("torchrun", tmp_path / "run", values, ranks=2, env=own)
    assert_same(run, one_without)
    assert "4 likeliest tokens" in run.output


def test_a_run_goes_on_without_its_teacher_bit_by_bit(
    taught: dict[str, Any], one_without: Finished, tmp_path: Path
) -> None:
    """Also where the cache is lost: the teacher is asked again."""
    shutil.copytree(one_without.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    values = {**kept(taught, 4), "per_device_train_batch_size": 8, "resume": "auto"}
    again = train("python", tmp_path / "run", values, env={"FINETUNE_CACHE": str(tmp_path / "cache")})
    assert "going on from" in again.output
    for name in FIGURES:
        assert again.column(name)[-2:] == one_without.column(name)[-2:]
    other = train("python", tmp_path / "run", {**values, "teacher_top_k": 3}, check=False)
    assert other.status == 2
    assert "--teacher_top_k" in other.errors[0]


@pytest.mark.nightly
def test_a_mixture_that_is_packed_finds_what_its_teacher_said(
    uneven: Path, taught: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copy(uneven, tmp_path / "b.jsonl")
    mixed = {"train_file": [f"{uneven}:0.7", f"{tmp_path / 'b.jsonl'}:0.3"], "packing": "bfd", "block_size": 32}
    mixed |= {"document_mask": True, "num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 4}
    asked, before = (train("python", tmp_path / name, {**flags, **mixed}) for name, flags in
                     (("asked", taught), ("before", kept(taught))))  # fmt: skip
    assert_same(before, asked, rel=1e-6)
    sources = [one.json("train_results.json")["sources"] for one in (asked, before)]
    assert sources[0] == sources[1]


def test_a_teacher_of_other_tokens_is_refused_before_the_first_step(
    uneven: Path, teacher: Finished, tmp_path: Path
) -> None:
    run = train(
        "python", tmp_path / "run", {"train_file": uneven, "tokenizer": "byte", "teacher": teacher.folder}, check=False
    )
    assert run.status == 2
    assert "by --tokenizer_name" in run.output
    run = train("python", tmp_path / "run", {"train_file": uneven, "teacher": tmp_path / "none"}, check=False)
    assert run.status == 2
    assert "--teacher" in run.output


def write_reviews(path: Path, labels: tuple[str, ...]) -> Path:
    draw = random.Random(0)
    rows = [
        (" ".join(draw.choices(["fine", "dull", "the", "film"], k=draw.randint(2, 25))), draw.choice(labels))
        for _ in range(120)
    ]
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return path


def classify(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    return launch(
        launcher,
        folder,
        {**TINY_CLASSIFIER, "max_train_samples": None, "max_eval_samples": None, "max_steps": 4, **values},
        **more,
    )


def test_classifiers_learn_the_same_on_two_ranks_and_other_labels_are_refused(tmp_path: Path) -> None:
    file = write_reviews(tmp_path / "a.csv", ("bad", "good"))
    teacher = classify("python", tmp_path / "teacher", {"train_file": file})
    taught = {
        "train_file": file,
        "tokenizer_name": teacher.folder,
        "teacher": teacher.folder,
        "class_weights": "balanced",
    }
    one = classify("python", tmp_path / "one", {**taught, "per_device_train_batch_size": 8})
    spread = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "deepspeed": "zero3"}
    assert_same(classify("torchrun", tmp_path / "two", {**taught, **spread}, ranks=2), one)

    others = {**taught, "train_file": write_reviews(tmp_path / "b.csv", ("no", "yes"))}
    refused = classify("python", tmp_path / "other", others, check=False)
    assert refused.status == 2
    assert "it knows bad, good, but the data has no, yes" in refused.output
