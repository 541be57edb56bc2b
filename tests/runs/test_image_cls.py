"""The image recipe as people use it: digits, their own pictures, CIFAR-10, layouts, resumption, a pipeline."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import REPO, Finished, gate_has, launch
from PIL import Image
from safetensors.numpy import load_file

pytestmark = pytest.mark.usefixtures("built_ops")

RECIPE = "recipes/image_cls.py"
SHORT: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "bf16": False,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
}
# What Adam makes of a gradient that is all but zero is rounding's choice; see benchmarks/images.py.
SAME: dict[str, Any] = {**SHORT, "optim": "sgd", "learning_rate": 0.01}
ALEXNET: dict[str, Any] = {"model_type": "alexnet", "dropout": 0.0}
TWO: dict[str, Any] = {"ranks": 2}


def train(launcher: str, folder: Path, values: dict[str, Any], **more: Any) -> Finished:
    return launch(launcher, folder, values, recipe=RECIPE, **more)


def write_pictures(folder: Path, each: int, seed: int) -> Path:
    """Vertical stripes and horizontal ones, in colours that tell nothing, of several sizes."""
    random = np.random.default_rng(seed)
    for name in ("lying", "standing"):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            side = int(random.integers(24, 40))
            stripes = (np.arange(side) // 4 % 2)[:, None, None] * random.integers(100, 255, (1, 1, 3))
            pixels = np.broadcast_to(stripes, (side, side, 3)).astype(np.uint8)
            pixels = pixels if name == "lying" else pixels.transpose(1, 0, 2)
            Image.fromarray(np.ascontiguousarray(pixels)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Trained on pictures of its own, and asked about others without classes."""
    home = tmp_path_factory.mktemp("own")
    write_pictures(home / "train", 60, 1)
    others = write_pictures(home / "others", 8, 2)
    (home / "test").mkdir()
    for path in others.rglob("*.png"):
        shutil.copy(path, home / "test" / f"{path.parent.name}-{path.name}")
    values = {**SHORT, "max_steps": 40, "train_dir": home / "train", "test_dir": home / "test", "do_predict": True}
    return train("python", home / "run", {**values, "save_strategy": "steps", "save_steps": 30})


def test_ones_own_pictures_are_learnt_predicted_and_open_as_a_pipeline_of_transformers(own_run: Finished) -> None:
    from transformers import pipeline

    wanted = (
        "README.md all_results.json config.json confusion_matrix.png environment.json eval_results.json metrics.jsonl"
    )
    wanted += " model.safetensors predictions.csv preprocessor_config.json recipe.yaml train_results.json"
    wanted += " training_curve.png"
    assert set(wanted.split()) <= {path.name for path in own_run.folder.iterdir()}
    found = list(csv.DictReader((own_run.folder / "predictions.csv").open()))
    assert len(found) == 16
    right = sum(row["picture"].startswith(row["prediction"]) for row in found)
    assert right >= 15
    assert own_run.json("all_results.json")["eval_accuracy"] >= 0.9
    assert {"train_samples_per_second", "eval_f1_macro", "peak_memory_gib"} <= set(own_run.json("all_results.json"))
    classify = pipeline("image-classification", str(own_run.folder), device="cpu")
    for row in found[:3] + found[-3:]:
        (best, *_) = classify(str(own_run.folder.parent / "test" / row["picture"]))
        assert best["label"] == row["prediction"]
        assert best["score"] == pytest.approx(float(row[f"probability_{row['prediction']}"]), abs=1e-3)
    card = (own_run.folder / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card
    assert "lying (54), standing (54)" in card


def test_a_resumed_run_changes_its_pictures_as_the_uncut_one(own_run: Finished, tmp_path: Path) -> None:
    """Crops and flips depend on epoch and picture; cut inside the fifth epoch, of seven steps each."""
    shutil.copytree(own_run.folder, tmp_path / "run")
    (tmp_path / "run" / "README.md").unlink()
    for path in (tmp_path / "run").glob("checkpoint-40*"):
        shutil.rmtree(path)
    home = own_run.folder.parent
    values = {**SHORT, "max_steps": 40, "train_dir": home / "train", "resume": "auto"}
    resumed = train("python", tmp_path / "run", {**values, "save_strategy": "steps", "save_steps": 30})
    assert [row["step"] for row in resumed.steps] == list(range(1, 41))
    assert resumed.column("loss") == pytest.approx(own_run.column("loss"), rel=1e-4)


def test_a_trained_model_is_evaluated_and_trained_on(own_run: Finished, tmp_path: Path) -> None:
    home = own_run.folder.parent
    values = {**SHORT, "model_name_or_path": own_run.folder, "validation_dir": home / "train", "do_train": False}
    alone = train("python", tmp_path / "alone", values)
    assert alone.json("all_results.json")["eval_accuracy"] >= 0.9
    other = train(
        "python", tmp_path / "other", {**SHORT, "model_name_or_path": own_run.folder, "do_train": False}, check=False
    )
    assert other.status == 2
    assert "knows the classes lying, standing" in other.errors[0] or "classes that are not in" in other.errors[0]
    more = {**SHORT, "model_name_or_path": own_run.folder, "train_dir": home / "train", "freeze_batch_norm": True}
    tuned = train("torchrun", tmp_path / "tuned", {**more, "deepspeed": "zero2"}, **TWO)
    before, after = (load_file(folder / "model.safetensors") for folder in (own_run.folder, tuned.folder))
    statistics = [name for name in before if "running" in name]
    assert statistics
    assert all(np.array_equal(before[name], after[name]) for name in statistics)
    assert any(not np.array_equal(before[name], after[name]) for name in before if "running" not in name)


@pytest.mark.nightly
def test_the_digits_are_told_apart_by_the_defaults_on_two_ranks(tmp_path: Path) -> None:
    run = train("deepspeed", tmp_path / "run", {}, ranks=2)
    assert run.json("eval_results.json")["eval_accuracy"] >= 0.97
    # The saved model is the evaluated one: each rank's statistics of batch norm are one and the same.
    again = train("python", tmp_path / "again", {"do_train": False, "model_name_or_path": run.folder})
    for name in ("eval_loss", "eval_accuracy"):
        assert again.json("eval_results.json")[name] == pytest.approx(run.json("eval_results.json")[name], rel=1e-3)


LAYOUTS = [
    pytest.param("torchrun", {"per_device_train_batch_size": 16}, id="DDP"),
    pytest.param("deepspeed", {"deepspeed": "zero2", "per_device_train_batch_size": 16}, id="ZeRO-2"),
    pytest.param("deepspeed", {"deepspeed": "zero3", "per_device_train_batch_size": 16}, id="ZeRO-3"),
    pytest.param(
        "torchrun",
        {"deepspeed": "zero1", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        id="ZeRO-1, two micro-batches",
    ),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of one process, for each kind of model."""
    known: dict[str, list[float]] = {}

    def losses(name: str, values: dict[str, Any]) -> list[float]:
        if name not in known:
            one = {**SAME, **values, "per_device_train_batch_size": 32}
            known[name] = train("python", tmp_path_factory.mktemp("alone") / "run", one).column("loss")
        return known[name]

    return losses


@pytest.mark.parametrize(("launcher", "layout"), LAYOUTS)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        pytest.param("group norm", {"norm": "group"}, id="ResNet, group norm"),
        pytest.param(
            "alexnet",
            {**ALEXNET, "crop_padding": 2, "horizontal_flip": True},
            id="AlexNet, changed pictures",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_loss_is_the_same_in_every_layout(
    name: str, values: dict[str, Any], launcher: str, layout: dict[str, Any], alone: Any, tmp_path: Path
) -> None:
    run = train(launcher, tmp_path / "run", {**SAME, **values, **layout}, **TWO)
    assert run.column("loss") == pytest.approx(alone(name, values), rel=1e-2)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_resnet_trains_in_bf16_under_deepspeed_with_statistics_in_fp32(stage: str, tmp_path: Path) -> None:
    """Such weights beside such statistics are refused by torch's own batch norm."""
    values = {**SHORT, "bf16": True, "deepspeed": stage, "max_steps": 2, "max_eval_samples": 20}
    run = train("python", tmp_path / "run", values)
    saved = safetensors.torch.load_file(run.folder / "model.safetensors")  # numpy knows no bf16
    statistics = [saved[name] for name in saved if "running" in name]
    assert statistics
    assert not any(torch.equal(kept, kept.bfloat16().float()) for kept in statistics), "none was rounded on its way"


@pytest.mark.parametrize("launcher", gate_has("torchrun", ["torchrun", "deepspeed"]))
def test_batch_norm_over_all_ranks_has_the_loss_of_one_process(launcher: str, alone: Any, tmp_path: Path) -> None:
    values = {**SAME, "per_device_train_batch_size": 16}
    run = train(launcher, tmp_path / "run", {**values, "sync_batch_norm": True}, **TWO)
    assert run.column("loss") == pytest.approx(alone("batch norm", {}), rel=1e-2)


def test_alexnet_as_a_pipeline_has_the_loss_of_one_process_and_resumes(alone: Any, tmp_path: Path) -> None:
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "schedule_step": 3}
    values = {**SAME, **ALEXNET, **batch, "pipeline_parallel_size": 2, "save_strategy": "steps", "save_steps": 4}
    run = train("deepspeed", tmp_path / "run", values, ranks=2)
    assert run.column("loss") == pytest.approx(alone("alexnet, plain", ALEXNET), rel=1e-2)
    wanted = "README.md confusion_matrix.png training_curve.png schedule.png preprocessor_config.json ds_config.json"
    assert set(wanted.split()) <= {path.name for path in run.folder.iterdir()}
    # Its folder is evaluated by the Trainer to the same figures.
    values_of_one = {"do_train": False, "model_name_or_path": run.folder, "bf16": False}
    one = train("python", tmp_path / "one", values_of_one)
    for name in ("eval_loss", "eval_accuracy", "eval_f1_macro", "eval_matthews"):
        assert one.json("eval_results.json")[name] == pytest.approx(run.json("eval_results.json")[name], abs=1e-4)
    (run.folder / "README.md").unlink()
    resumed = train("torchrun", run.folder, {**values, "resume": "auto", "max_steps": 8}, ranks=2)
    assert [row["step"] for row in resumed.steps] == list(range(1, 9))


def test_the_shipped_yaml_runs_on_files_like_cifars(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "cifar").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = random.integers(0, 256, (100, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(100) % 10
        (tmp_path / "cifar" / f"{name}.bin").write_bytes(rows.tobytes())
    config = REPO / "recipes" / "configs" / "image_cls_cifar10.yaml"
    values = {"config": config, "cifar_dir": tmp_path / "cifar", "max_steps": 2, "logging_steps": 1, "image_size": 32}
    run = train("python", tmp_path / "run", {**values, "per_device_train_batch_size": 8})
    assert len(run.steps) == 2
    assert "predict_accuracy" in run.json("all_results.json")
    assert json.loads((run.folder / "config.json").read_text())["hidden_sizes"] == [64, 128, 256, 512]


REFUSED = [
    pytest.param({"do_predict": True}, "needs a test split.*--test_dir", id="nothing to predict"),
    pytest.param(
        {"pipeline_parallel_size": 1}, "--model_type is 'resnet' .*not a list of layers here", id="no pipeline"
    ),
    pytest.param(
        {"pipeline_parallel_size": 1, "model_type": "alexnet", "metrics": "pearson"},
        "--metrics pearson: a pipeline's evaluation .*TypeError.* drop --pipeline_parallel_size",
        id="a metric that takes no sums",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_cannot_be_is_refused_once_and_nothing_is_made(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = train("python", tmp_path / "run", {**SHORT, **values}, check=False)
    assert run.status == 2, run.output[-3000:]
    assert len(run.errors) == 1
    assert re.search(message, run.errors[0]), run.errors
    assert not (tmp_path / "run").exists()
