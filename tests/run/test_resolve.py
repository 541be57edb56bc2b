"""Flags, YAML, and how a launch is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finetune.training.arguments import Request

from finetune.errors import RequestError
from finetune.run.flags.common import RunArguments
from finetune.run.flags.text import ClassArguments, DataArguments
from finetune.run.launch import Launch, read_launch

GROUPS = (DataArguments, ClassArguments, RunArguments)


def request(*argv: str, **defaults: Any) -> Request:
    return Request(GROUPS, {"output_dir": "out", **defaults}, argv, Launch(), {"learning_rate": 1e-3})


def test_flags_overrule_the_yaml_which_overrules_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_train_epochs: 2\nmax_steps: 7\ntext_column_names: [a, b]\nbf16: false\nseed: null\n")
    found = request("--config", str(path), "--max_steps", "9", num_train_epochs=1.0, logging_steps=3)
    assert found.value("max_steps") == 9
    assert found.value("num_train_epochs") == 2.0
    assert found.value("logging_steps") == 3
    assert found.value("text_column_names") == ["a", "b"]
    assert found.given["bf16"] is False
    assert found.value("seed") == 42  # the Trainer's
    assert "seed" not in found.given


def test_scratch_defaults_are_for_runs_without_a_model() -> None:
    from finetune.run.flags.text import ModelArguments

    groups = (*GROUPS, ModelArguments)
    named = Request(groups, {"output_dir": "o"}, ["--model_name_or_path", "x"], Launch(), {"learning_rate": 1e-3})
    assert request().value("learning_rate") == 1e-3
    assert named.value("learning_rate") == 5e-5


def test_the_local_rank_of_the_deepspeed_launcher_ends_here() -> None:
    assert request("--local_rank=1").given == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--learning_rate", "-1"], "must be 0 or more", id="negative rate"),
        pytest.param(["--max_steps", "-5"], "must be 1 or more, or -1", id="negative steps"),
        pytest.param(["--resume", "auto", "--overwrite_output_dir", "True"], "contradict", id="resume and overwrite"),
        pytest.param(["--deepspeed", "zero1", "--deepspeed_config", "x"], "twice", id="two configs"),
        pytest.param(["--class_weights", "heavy"], "none or balanced", id="unknown weights"),
        pytest.param(["--task", "ranking"], "classification or regression", id="unknown task"),
        pytest.param(["--per_device_train_batch_size", "0"], "must be 1 or more", id="empty batch"),
        pytest.param(["--activation_checkpoint_interval", "0"], r"must be 1 \(every layer\)", id="no interval"),
        pytest.param(["--optim", "adamw_torch_8bit"], "needs torchao, which is not installed", id="torchao is missing"),
        pytest.param(
            ["--gradient_accumulation_step", "2"], "Did you mean --gradient_accumulation_steps", id="misspelt"
        ),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request(*argv)


def test_what_the_trainer_refuses_is_a_request_error() -> None:
    with pytest.raises(RequestError, match=r"lr_scheduler_type|is not a valid"):
        request("--lr_scheduler_type", "sideways").build()


def test_argument_classes_stay_small() -> None:
    from dataclasses import fields

    from finetune.run.flags.language import AdapterArguments, BlockArguments, CausalModelArguments, CorpusArguments
    from finetune.run.flags.text import ModelArguments, PreparationArguments

    more = (ModelArguments, PreparationArguments)
    language = (CausalModelArguments, AdapterArguments, CorpusArguments, BlockArguments)
    assert all(len(fields(group)) <= 12 for group in (*GROUPS, *more, *language))


LAUNCHES = [
    pytest.param({}, Launch(), id="plain python"),
    pytest.param(
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_SIZE": "2"},
        Launch(3, 1, 4, 2, "deepspeed"),
        id="deepspeed on two nodes",
    ),
    pytest.param(
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        Launch(1, 1, 2, 2, "torchrun"),
        id="torchrun",
    ),
    pytest.param(
        {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ACCELERATE_MIXED_PRECISION": "no",
        },
        Launch(0, 0, 2, 2, "accelerate"),
        id="accelerate",
    ),
]


@pytest.mark.parametrize(("env", "expected"), LAUNCHES)
def test_a_launch_is_read_from_the_environment(env: dict[str, str], expected: Launch, monkeypatch: Any) -> None:
    for name in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE CROSS_SIZE ACCELERATE_MIXED_PRECISION".split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == expected


def test_a_key_that_is_twice_in_a_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max_steps: 7\nseed: 1\nmax_steps: 9\n")
    with pytest.raises(RequestError, match=r"c\.yaml:3:1: .*'max_steps' is there twice"):
        request("--config", str(path))
