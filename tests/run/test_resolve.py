"""Flags, YAML, and how a launch is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from asked import run_of

from finetune.errors import RequestError
from finetune.run.engine import deepspeed_config_of
from finetune.run.flags.guards import GuardArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.text import ClassArguments, DataArguments, ModelArguments
from finetune.run.launch import Launch, read_launch
from finetune.run.run import Run
from finetune.training.start import training_arguments

GROUPS = (DataArguments, ClassArguments, ModelArguments, GuardArguments)


def request(*argv: str, **defaults: Any) -> Run:
    return run_of(*argv, groups=GROUPS, scratch={"learning_rate": 1e-3}, **defaults)


def test_flags_overrule_the_yaml_which_overrules_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("weight_decay: 2\nmax_steps: 7\ntext_column_names: [a, b]\nbf16: false\nseed: null\n")
    found = request("--config", str(path), "--max_steps", "9", weight_decay=1.0, logging_steps=3)
    assert found.value("max_steps") == 9
    assert found.value("weight_decay") == 2.0
    assert found.value("logging_steps") == 3
    assert found.value("text_column_names") == ["a", "b"]
    assert found.given["bf16"] is False
    assert found.value("seed") == 42  # the Trainer's
    assert "seed" not in found.given


def test_scratch_defaults_are_for_runs_without_a_model() -> None:
    assert request().value("learning_rate") == 1e-3
    assert request("--model_name_or_path", "x").value("learning_rate") == 5e-5


def test_the_local_rank_of_the_deepspeed_launcher_ends_here() -> None:
    assert request("--local_rank=1").given == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--learning_rate", "-1"], "must be 0 or more", id="negative rate"),
        pytest.param(["--max_steps", "-5"], "must be 1 or more, or -1", id="negative steps"),
        pytest.param(["--resume", "auto", "--overwrite_output_dir", "True"], "contradict", id="resume and overwrite"),
        pytest.param(["--deepspeed", "zero1", "--deepspeed_config", "x"], "twice", id="two configs"),
        pytest.param(["--class_weights", "heavy"], "none, balanced", id="unknown weights"),
        pytest.param(["--task", "ranking"], "classification, regression", id="unknown task"),
        pytest.param(["--per_device_train_batch_size", "0"], "must be 1 or more", id="empty batch"),
        pytest.param(["--activation_checkpoint_interval", "0"], "must be 1 or more", id="no interval"),
        pytest.param(["--optim", "adamw_torch_8bit"], "needs torchao, which is not installed", id="torchao is missing"),
        pytest.param(
            ["--gradient_accumulation_step", "2"], "Did you mean --gradient_accumulation_steps", id="misspelt"
        ),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request(*argv)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-lr 3", r"-lr \(command line\): a flag begins with two dashes\. Did you mean --learning_rate\?"),
        ("--seed 1 -max_steps=3", "-max_steps=3 .* Did you mean --max_steps"),
        ("\u2014lr 3", "a flag begins with two dashes. Did you mean --learning_rate"),
        ("-x", "-x .* `--help` lists them"),
        ("--", "it is not followed by a flag"),
        ("--wrld 2", "The launcher sets the number of ranks"),
        ("--teacher x", r"no such flag\. A teacher is for recipes/causal_lm\.py and seq_cls\.py\."),
    ],
)
def test_words_that_are_nearly_flags_are_told(words: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as met:
        request(*words.split())
    assert "\n" not in str(met.value)


def test_what_the_trainer_refuses_is_a_request_error() -> None:
    with pytest.raises(RequestError, match=r"load_best_model_at_end|eval"):
        training_arguments(request("--load_best_model_at_end", "True", "--eval_strategy", "no"))


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
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
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
    with pytest.raises(
        RequestError, match=r"--max_steps \(.*c\.yaml line 3\) is given twice, first in .*c\.yaml line 1"
    ):
        request("--config", str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: &a 1\nmax_steps: *a\n", r"c\.yaml:2:12: .* has an alias"),
        ("lr_scheduler_kwargs: {<<: {a: 1}}\n", r"c\.yaml:1:23: .* has a merge key"),
        ("<<: 1\n", r"c\.yaml:1:1: .* has a merge key"),
        ("".join(f"key_{i}: 1\n" for i in range(1001)), r"c\.yaml: has 1,001 lines; at most 1,000"),
        (f"seed: {'9' * 400}\n", r"--seed .*must be a whole number"),
        (f"learning_rate: {'9' * 400}\n", r"--learning_rate .*must be a number"),
    ],
    ids=["alias", "merge key", "merge key of a word", "many keys", "huge whole number", "huge number"],
)
def test_a_yaml_that_means_too_much_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(RequestError, match=said):
        request("--config", str(tmp_path / "c.yaml"))


def test_every_mistake_is_said_at_once_with_its_source_and_what_is_probably_meant(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# a comment\nlr: 1e-4\nseed: many\n")
    with pytest.raises(RequestError) as met:
        request("stray", "--config", str(path), "--batch_size", "8", "--max_lenght", "9", "--bf16", "perhaps")
    said = str(met.value)
    assert f"--lr ({path} line 2)" in said
    assert "--learning_rate?" in said
    assert f"--seed is 'many' ({path} line 3), but it must be a whole number" in said
    assert "--per_device_train_batch_size?" in said
    assert "--max_seq_length?" in said
    assert "--bf16 is 'perhaps' (command line), but it must be True or False" in said
    assert "unexpected argument stray" in said
    assert said.count("\n") == 5


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *(("bs", "per_device_train_batch_size"), ("epochs", "num_train_epochs"), ("max_length", "max_seq_length")),
        *(("gradient_accumulation_step", "gradient_accumulation_steps"), ("evaluation_strategy", "eval_strategy")),
        *(
            ("model", "model_name_or_path"),
            ("fp32", "bf16"),
            ("Learning-Rate", "learning_rate"),
            ("wd", "weight_decay"),
        ),
        *(("batchsize", "per_device_train_batch_size"), ("epoches", "num_train_epochs")),
    ],
)
def test_a_word_that_is_no_flag_is_understood_by_its_meaning(word: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"--{meant}"):
        request(f"--{word}", "1")


@pytest.mark.parametrize(
    ("yaml", "name", "value"),
    [
        ("save_strategy: no", "save_strategy", "no"),
        ("eval_strategy: off", "eval_strategy", "no"),
        ("bf16: yes", "bf16", True),
        ("learning_rate: 2e-5", "learning_rate", 2e-5),
        ("max_steps: 1e3", "max_steps", 1000),
        ("report_to: wandb", "report_to", ["wandb"]),
        ("report_to: [none]", "report_to", ["none"]),
        ("lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 2}", "lr_scheduler_kwargs", {"num_cycles": 2}),
        ("label_column_name: 7", "label_column_name", "7"),
        *((f"async_save: {word}", "async_save", "on") for word in ("on", "yes", "true", '"on"', '"yes"')),
        *((f"async_save: {word}", "async_save", "off") for word in ("off", "no", "false", '"off"', '"no"')),
        ("async_save: auto", "async_save", "auto"),
    ],
)
def test_yaml_means_what_its_writer_means(yaml: str, name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml + "\n")
    assert request("--config", str(tmp_path / "c.yaml")).value(name) == value


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--bf16", "false"], "bf16", False),
        (["--bf16=False"], "bf16", False),
        (["--bf16"], "bf16", True),
        (["--no_group_by_length"], "group_by_length", False),
        (["--text_column_names", "a", "b"], "text_column_names", ["a", "b"]),
        (["--lr_scheduler_kwargs={}"], "lr_scheduler_kwargs", {}),
        (["--max_seq_length", "none"], "max_seq_length", None),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--max_steps", "+5"], "max_steps", 5),
        (["--max_steps", "9007199254740993"], "max_steps", 2**53 + 1),
        (["--max_grad_norm", "inf"], "max_grad_norm", math.inf),
        *((["--async_save", word], "async_save", "on") for word in ("on", "yes", "True", "1", "ON")),
        *((["--async_save", word], "async_save", "off") for word in ("off", "no", "False", "0")),
        (["--async_save=auto"], "async_save", "auto"),
    ],
)
def test_words_mean_what_their_writer_means(words: list[str], name: str, value: Any) -> None:
    assert request(*words).value(name) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning_rate", "1", "2"], "expects one value, not 2"),
        (["--learning_rate"], "needs a value"),
        (["--learning_rate", "nan"], "must be a number"),
        (["--max_steps", "2.5"], "must be a whole number"),
        (["--max_steps", "+-5"], r"--max_steps is '\+-5' \(command line\), but it must be a whole number"),
        (["--max_steps", "inf"], "must be a whole number"),
        (["--max_steps", "9" * 400], "must be a whole number"),
        (["--optim", "adam"], "must be one of adamw_torch"),
        (["--optim", "adamwx"], "stable_adamw; you may mean adamw_torch"),
        (["--optim", "Paged_AdamW"], "; you may mean paged_adamw_32bit"),
        (["--class_weights", "balancd"], "must be one of none, balanced; you may mean balanced"),
        (["--class_weights", "q"], "must be one of none, balanced\\."),
        (["--num_train_epochs", "inf"], "must be more than 0 and finite"),
        (["--learning_rate", "inf", "--warmup_steps", "inf"], "--learning_rate is inf .* 0 or more and finite"),
        (["--save_total_limit", "0"], "which keeps every checkpoint. Write none for that"),
        (["--train_file", "a.csv", "--encoding", "utf9"], "which Python does not know"),
        (["--train_file", "a.csv", "--encoding", "base64"], "which Python does not know"),
        (["--lr_scheduler_kwargs", "{a"], "is not valid JSON"),
        (["--async_save", "always"], "--async_save is 'always' .* must be one of auto, on, off"),
        (["--async_save", "2"], "must be one of auto, on, off"),
        (["--async_save"], "needs a value"),
    ],
)
def test_values_that_are_none_of_their_flag_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        request(*words)


def test_a_yaml_of_another_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("recipe: causal_lm\nmax_steps: 3\n")
    with pytest.raises(RequestError, match=r"is for recipes/causal_lm\.py"):
        request("--config", str(tmp_path / "c.yaml"))
    (tmp_path / "c.yaml").write_text("recipe: test\nmax_steps: 3\n")
    assert request("--config", str(tmp_path / "c.yaml")).value("max_steps") == 3


def test_each_value_knows_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max_steps: 7\n")
    run = request(
        "--config", str(path), "--seed", "3", "--early_stopping_patience", "2", do_eval=True, eval_strategy="steps"
    )
    assert run.said("seed") == "--seed is 3 (command line)"
    assert run.said("max_steps") == f"--max_steps is 7 ({path} line 1)"
    assert run.said("output_dir") == "--output_dir is 'out' (default of recipes/test.py)"
    assert run.said("weight_decay") == "--weight_decay is 0.0 (default)"
    assert run.value("load_best_model_at_end") is True
    assert "--early_stopping_patience" in run.said("load_best_model_at_end")
    assert "seed" in run.given
    assert "load_best_model_at_end" not in run.given


def test_a_flag_of_the_pipeline_is_not_passed_over_by_the_trainer() -> None:
    from finetune.run.recipes.image_cls import IMAGE_CLS
    from finetune.run.resolve import resolve

    alexnet = ["--model_type", "alexnet"]
    with pytest.raises(RequestError, match=r"--partition_method .* is for a pipeline\. Add --pipeline_parallel_size"):
        resolve(IMAGE_CLS, ["--partition_method", "uniform"], Launch())
    assert resolve(IMAGE_CLS, [*alexnet, "--pipeline_parallel_size", "1"], Launch()).stages == 1
    assert resolve(IMAGE_CLS, [], Launch()).stages is None
    with pytest.raises(RequestError, match="--class_weights"):
        resolve(IMAGE_CLS, [*alexnet, "--pipeline_parallel_size", "1", "--class_weights", "balanced"], Launch())


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed", "--deepspeed_config", "zero3"],
        ["--deepspeed_config", "zero3", "--deepspeed"],
        ["--deepspeed", "True", "--deepspeed_config=zero3"],
        ["--deepspeed", "--deepspeed-config", "zero3"],
    ],
)
def test_deepspeed_may_be_a_switch_beside_its_config(words: list[str]) -> None:
    run = request(*words)
    assert "deepspeed" not in run.given
    assert deepspeed_config_of(run) == "zero3"


def test_the_switch_and_the_config_may_stand_in_a_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("deepspeed: true\ndeepspeed_config: zero3\n")
    assert deepspeed_config_of(request("--config", str(path))) == "zero3"
    path.write_text("deepspeed_config: zero3\n")
    assert deepspeed_config_of(request("--deepspeed", "--config", str(path))) == "zero3"


def test_the_switch_alone_and_two_configs_are_refused() -> None:
    with pytest.raises(RequestError, match=r"--deepspeed .*needs a value"):
        request("--deepspeed")
    with pytest.raises(RequestError, match="twice"):
        request("--deepspeed", "zero2", "--deepspeed_config", "zero3")


def test_whose_recipe_keeps_no_teachers_answers_is_told_which_does() -> None:
    with pytest.raises(RequestError, match=r"no such flag\. Only recipes/causal_lm\.py caches a teacher's outputs"):
        request("--teacher_top_k", "4")


@pytest.mark.parametrize("word", ["pipeline_num_stages", "num_stages", "pp"])
def test_stages_are_answered_in_recipes_that_have_them_and_in_others(word: str) -> None:
    with pytest.raises(RequestError, match=r"no such flag\. Did you mean --pipeline_parallel_size\?"):
        run_of(f"--{word}", "2", groups=(PipelineArguments,))
    with pytest.raises(RequestError, match=r"no such flag\. Stages are for recipes/causal_lm_pipeline\.py"):
        request(f"--{word}", "2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_steps: [4]\n", r"--max_steps is \[4\] \(.* line 1\), but it must be one value, not a list"),
        ("config: other.yaml\n", r"--config \(.* line 1\): a YAML cannot include another one"),
    ],
)
def test_a_yaml_that_says_what_a_run_would_pass_over_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(RequestError, match=words):
        request("--config", str(tmp_path / "c.yaml"))
