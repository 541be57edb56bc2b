"""`finetune plan`: from a YAML, a model or a name to an answer, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, gate_has

from finetune.cli import main
from finetune.plan.named import find_model_config
from finetune.plan.run_model import described
from finetune.run.launch import Launch

POST = "recipes/configs/gptlite_post.yaml"
UNKNOWN = {
    "model_type": "nothing_at_all",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    return dict(json.loads(capsys.readouterr().out))


def test_a_recipe_is_planned_as_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    """recipes/configs/gptlite_post.yaml: 12 layers of 768, 65 characters, blocks of 2,048, micro-batches of 8."""
    job = planned(capsys, POST, "--gpu", "H100-80GB", "--nodes", "4", "--no_search")["job"]
    layer = 12 * 768**2 + 13 * 768  # four matrices and their biases, two norms
    assert job["parameters"] == 12 * layer + 2 * 65 * 768 + 2048 * 768 + 2 * 768
    assert (job["world_size"], job["micro_batch"], job["tokens"], job["checkpoint_interval"]) == (32, 8, 2048, 1)
    assert job["precision"] == "bf16"


def test_a_flag_overrules_the_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--per_device_train_batch_size", "2", "--block_size", "128", "--bf16", "False", "--deepspeed", "zero3")
    job = planned(capsys, POST, *words, "--no_search")["job"]
    assert (job["micro_batch"], job["tokens"], job["precision"], job["zero"]["stage"]) == (2, 128, "fp32", 3)


MODELS_GIVEN = (
    "instruction",
    "preference_dpo",
    "lora_24gb",
    "lora_zero3",
    "token_cls_conll",
    "embedding_retrieval",
    "seq2seq_translation",
)  # the own models of the last three are not in the table


def test_every_shipped_recipe_config_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    every = sorted((REPO / "recipes/configs").glob("*.yaml"))
    files = [file for file in every if not file.stem.startswith("bench_")]  # grids of `finetune bench`
    assert len(files) >= 9
    named = {"seq2seq_translation": "t5-small"}
    named |= dict.fromkeys(("token_cls_conll", "embedding_retrieval"), "bert-base-uncased")
    for file in files:  # some go on from a model, which the command line gives
        model = ["--model_name_or_path", named.get(file.stem, "Llama-3.2-1B")] if file.stem in MODELS_GIVEN else []
        found = planned(capsys, str(file), *model, "--gpu", "A100-80GB", "--no_search")
        assert found["ranks"][0]["peak"]["bytes"] > found["ranks"][0]["resident_bytes"] > 0


def test_the_search_ranks_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "gpt2", "--gpu", "A100-40GB", "--gpus_per_node", "2", "--global_batch_size", "32")
    fitting = [one for one in found["layouts"] if one["why_not"] is None]
    speeds = [one["samples_per_second"] for one in fitting]
    assert len(fitting) >= 5
    assert speeds == sorted(speeds, reverse=True)
    assert all(one["job"]["global_batch"] == 32 for one in fitting)
    assert all(one["peak_bytes"] <= found["limit_bytes"] for one in fitting)


def test_what_is_written_passes_the_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    words = ["Llama-2-7b", "--gpu", "A100-80GB", "--global_batch_size", "64", "--block_size", "1024"]
    assert main(["plan", *words, "--write", str(path)]) == 0
    said = capsys.readouterr().out
    assert "--per_device_train_batch_size" in said
    assert str(path) in said
    assert main(["check", str(path), "--world_size", "8", "--gpu"]) == 0
    assert main(["plan", *words, "--write", str(path)]) == 2  # it exists
    assert "already exists" in capsys.readouterr().err


def test_what_does_not_fit_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["Llama-2-7b", "--gpu", "A100-40GB", "--gpus_per_node", "8", "--deepspeed", "zero1", "--no_search"]
    assert main(["plan", *words]) == 1
    said = capsys.readouterr().out
    assert "zero3" in said


@pytest.mark.parametrize(
    ("gpu", "flags", "proposed"),
    [
        ("RTX3090", (), ["--use_peft True", "--use_peft True --load_in_4bit True"]),
        ("RTX3080", (), ["--use_peft True --load_in_4bit True"]),
        ("RTX3080", ("--use_peft", "True", "--layouts", "none"), ["--use_peft True --load_in_4bit True"]),
        ("RTX3080", ("--layouts", "zero2_offload"), []),  # adapters are not searched with offload
        ("RTX3080", ("--use_peft", "True", "--load_in_4bit", "True", "--block_size", "8192"), []),
    ],
)
def test_a_model_that_fits_no_layout_is_proposed_with_adapters(
    gpu: str, flags: tuple[str, ...], proposed: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "300")
    main(["plan", "Qwen2.5-7B", "--gpu", gpu, "--gpus_per_node", "1", "--host_memory", "32", *flags])
    lines = [line.removeprefix("  fits with ") for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(" --deepspeed")[0] for line in lines if line.startswith("--use_peft")] == proposed


def test_adapters_that_are_proposed_fit_as_proposed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    words = ["Llama-3.1-8B", "--gpu", "RTX4090", "--gpus_per_node", "1"]
    assert main(["plan", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    (said,) = (re.search(r"fits with (--.*): ([\d.]+) GiB", line) for line in lines if "--load_in_4bit" in line)
    assert said is not None
    flags, size = said.groups()
    found = planned(capsys, *words, *flags.split(), "--no_search")
    assert found["fits"]
    assert found["ranks"][0]["peak"]["bytes"] / 2**30 == pytest.approx(float(size), abs=0.01)


def test_host_memory_is_the_profiles_or_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one GPU of eight, a note says that the plan counts on more than its share."""
    words = ("Llama-2-13b", "--gpu", "A100-80GB", "--gpus_per_node", "1", "--deepspeed", "zero3_offload",
             "--per_device_train_batch_size", "1", "--no_search")  # fmt: skip
    share = "not only the 256 GiB of 1 of its 8 GPUs"
    larger = planned(capsys, "Llama-2-70b", *words[1:])
    assert larger["fits"]
    assert any(share in note for note in larger["notes"])
    smaller = planned(capsys, *words)
    told = planned(capsys, *words, "--host_memory", "200")
    assert (smaller["fits"], told["fits"]) == (True, False)
    assert smaller["ranks"] == told["ranks"]
    assert not any("--host_memory" in note for note in told["notes"])
    on_cpu = planned(capsys, "gpt2", "--host_memory", "3")
    assert on_cpu["limit_bytes"] <= 3 * 2**30
    enough = planned(capsys, "Llama-2-70b", *words[1:], "--host_memory", "2048")
    assert enough["fits"]
    assert not any("--host_memory" in note for note in enough["notes"])


def test_an_unknown_family_is_planned_by_its_parameters_a_layer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(UNKNOWN))
    assert main(["plan", str(tmp_path)]) == 2
    assert re.search(r"'nothing_at_all', which transformers .* lacks.*--params_per_layer", capsys.readouterr().err)
    found = planned(capsys, str(tmp_path), "--params_per_layer", "50000", "--no_search")
    assert found["job"]["parameters"] == pytest.approx(2 * 50_000 + 2 * 300 * 64, rel=0.05)
    assert any("planned as a Llama" in note for note in found["notes"])
    assert not any("one attention head" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": 5}, "architectures is 5, but it must be a list"),
        ({"architectures": {"a": 1}}, "architectures is {'a': 1}, but it must be a list"),
        ({"text_config": "x"}, "text_config is 'x', but it must be an object"),
    ],
)
def test_a_config_of_another_form_is_refused_by_name(
    change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**UNKNOWN, **change}))
    assert main(["plan", str(tmp_path), "--params_per_layer", "50000"]) == 2
    assert f"config.json: {said}." in capsys.readouterr().err


def test_a_head_that_a_config_does_not_name_is_said_to_be_assumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without = {name: value for name, value in UNKNOWN.items() if "head" not in name}
    (tmp_path / "config.json").write_text(json.dumps(without))
    found = planned(capsys, str(tmp_path), "--params_per_layer", "50000", "--no_search")
    assert any(note.endswith("and one attention head, because its config names none") for note in found["notes"])


def test_a_flag_takes_several_values_as_in_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """--train_file takes one file in some recipes, several in others."""
    assert main(["plan", "--model_size", "tiny", "--train_file", "a.jsonl:0.7", "b.jsonl:0.3"]) == 0
    assert "gptlite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to plan"),
        (["gpt3"], "no model is known by this name"),
        (["moe-tiny"], "--recipe causal_lm --model_size moe-tiny"),
        (["seq_cls", "--recipe", "causal_lm"], "are both a recipe"),
        (["gpt2", "--ranks", "1"], "--ranks is 1, but it is for --calibrate. --gpus_per_node sets"),
        (["gpt2", "--gpu", "H200-80GB"], "H200"),
        (["gpt2", "--nodes", "0"], "--nodes is 0"),
        (["gpt2", "--nodes", "100000"], "Mistyped"),
        (["gpt2", "--gpus_per_node", "-8"], "--gpus_per_node is -8"),
        (["gpt2", "--per_device_train_batch_size", "-1"], "--per_device_train_batch_size is -1"),
        (["gpt2", "--block_size", "4096"], "the model has 1024 positions"),
        (["gpt2", "--deepspeed", "zero4"], "there is no such DeepSpeed config"),
        (["gpt2", "--optim", "lion_9bit"], "--optim is 'lion_9bit'"),
        (["gpt2", "--optim", "lion_32bit"], "--optim lion_32bit: its memory is not known"),
        (["gpt2", "--fp16", "True", "--gpu", "cpu"], "has no fp16"),
        (["gpt2", "--global_batch_size", "7", "--gpu", "A100-80GB"], "--global_batch_size 7"),
        (["gpt2", "--global_batch_size", "-7"], "--global_batch_size is -7"),
        (["gpt2", "--pipeline_parallel_size", "2"], "are planned, and this is a gpt2"),
        ([POST, "--pipeline_parallel_size", "3"], "is not a multiple of 3"),
        ([POST, "--pipeline_parallel_size", "20", "--nodes", "20"], "20 pipeline stages, but the model has 16 layers"),
        (["gpt2", "--autotune", "2", "--no_search"], "--autotune needs the search"),
        (["gpt2", "--write", "/nonexistent/ds.json"], "there is no folder /nonexistent"),
        (["gpt2", "--write", "/proc/ds.json"], "/proc/ds.json: cannot be written"),
        (["gpt2", "--write", "a" * 300], "a is not a usable path .File name too long"),
        (["gpt2", "--gpu", "~nobody-of-that-name/gpu.json"], "home directory"),
        (["gpt2", "--verify", "--json"], "--json does not apply to it"),
        (["gpt2", "--json", "--html", "page.html"], "--json cannot be combined with --html"),
        (["gpt2", "--max_grad_norm", "abc"], "--max_grad_norm is 'abc'"),
        (["gpt2", "--use_peft", "True", "--lora_dropout", "abc"], "--lora_dropout is 'abc'"),
        (["gpt2", "--attn_implementation", "foo"], "--attn_implementation is 'foo'"),
        (["gpt2", "--bf16", "maybe"], "--bf16 is 'maybe'"),
        (["gpt2", "--bf16", "True", "--fp16", "True", "--gpu", "A100-80GB"], "--fp16 is True .*Keep one"),
        (["gpt2", "--params_per_layer", "-4"], "--params_per_layer is -4"),
        (["gpt2", "--per_device_train_batch_size", "99999999999"], "Mistyped"),
        (["gpt2", "--layouts", "pipeline"], "none is possible for this run: pipeline is for GPT-lites"),
        (["gpt2", "--gpu", "H200", "--layouts", "zeropp"], "zeropp for several nodes of GPUs"),
        (["recipes/configs/instruction.yaml"], "--model_name_or_path if the recipe starts from one"),
        (["recipes/configs/lora_zero3.yaml"], "Add --model_name_or_path"),
        (["gpt2", "--model_size", "tiny"], "--model_size is 'tiny'"),
        (
            ["--model_size", "tiny", "--partition_method", "type:Block"],
            r"--partition_method is 'type:Block' \(command line\)",
        ),
        (["--model_size", "tiny", "--config_overrides", "num_hidden_layers=1000000"], "1,000,000 layers"),
        (["--model_size", "tiny", "--config_overrides", "hidden_size=1000000000000"], "Mistyped"),
        ([POST, "--config", "b.yaml"], "are both YAMLs"),
        (["recipes/configs/bench_laptop.yaml"], "is a grid for `finetune bench"),
        (["gpt2", "--max_steps", "3", "--max_steps", "4"], "--max_steps is given twice"),
        (["gpt2", "--layouts", "zero9"], "zero9"),
        (["gpt2", "--autotune", "0"], "--autotune is 0"),
        (["--model_type", "alexnet"], r"--model_type is 'alexnet' \(command line\): its memory is not known"),
        (["gpt2", "--recipe", "seq_cls", "--block_size", "64"], "recipes/seq_cls.py has no such flag. Did you mean"),
        ([POST, "--recipe", "seq_cls"], "is for recipes/causal_lm.py, not for recipes/seq_cls.py"),
        (["gpt2", "--lr", "1e-4"], "unknown flag --lr for `finetune plan`. Did you mean --learning_rate?"),
        (["gpt2", "--max_length", "9"], "Did you mean --max_seq_length or --block_size or --max_source_length?"),
        (
            ["gpt2", "--fsdp", "offload", "--nodes", "2"],
            r"--fsdp is 'offload' \(command line\): only --fsdp True",
        ),
        (["gpt2", "--price_per_gpu_hour", "0"], "--price_per_gpu_hour is 0, but it must be a number above 0"),
        (["gpt2", "--price_per_gpu_hour", "-2"], "--price_per_gpu_hour is -2"),
        (["gpt2", "--price_per_gpu_hour", "inf"], "--price_per_gpu_hour is inf"),
        (["gpt2", "--price_per_gpu_hour", "nan", "--verify"], "--price_per_gpu_hour is nan"),
        (["gpt2", "--price_per_gpu_hour", "2", "--verify"], "--price_per_gpu_hour cannot be combined with --verify"),
        (["gpt2", "--deadline", "0"], "--deadline is 0"),
        (["gpt2", "--host_memory", "0"], "--host_memory is 0, but it must be a number of GiB, 0.1 or more"),
        (["gpt2", "--host_memory", "nan"], "--host_memory is nan"),
        (["gpt2", "--host_memory", "1e305"], "--host_memory is 1e\\+305"),
        (["gpt2", "--deadline", "2"], "--deadline: the number of steps depends on the data.*Give --max_steps"),
        (
            ["gpt2", "--deadline", "2", "--max_steps", "9", "--nodes", "2"],
            "--deadline cannot be combined with --nodes",
        ),
        (["gpt2", "--deadline", "2", "--max_steps", "9", "--global_batch_size", "0"], "0 allows any. Give one"),
        (
            ["gpt2", "--deadline", "1e-9", "--max_steps", "9", "--gpu", "T4"],
            "1e-09: no cluster finishes 9 steps.*; even at peak speed 64 ranks take [0-9.e-]+ hours",
        ),
        (
            ["gpt2", "--deadline", "2", "--max_steps", "9", "--deepspeed", "zero2"],
            r"--deadline cannot be combined with --deepspeed \(command line\)",
        ),
        (
            ["gpt2", "--deadline", "2", "--max_steps", "9", "--fsdp", "True"],
            "--deadline cannot be combined with --fsdp",
        ),
        (
            [POST, "--deadline", "2", "--max_steps", "9", "--pipeline_parallel_size", "2"],
            "--deadline cannot be combined with --pipeline_parallel_size",
        ),
        (
            ["gpt2", "--fsdp", "True", "--layouts", "zero3", "--largest_batch"],
            "--layouts cannot be combined with --fsdp",
        ),
        (
            [POST, "--pipeline_parallel_size", "2", "--layouts", "zero2", "--largest_batch"],
            "--layouts cannot be combined with --pipeline_parallel_size",
        ),
        (
            ["gpt2", "--deepspeed", "zero2", "--layouts", "zero3", "--largest_batch"],
            "--layouts cannot be combined with --deepspeed",
        ),
        (
            ["gpt2", "--dtype", "pure_bfloat16", "--layouts", "zero2", "--largest_batch", "--gpu", "A100-80GB"],
            "which DeepSpeed does not support. Add none to --layouts",
        ),
        (["gpt2", "--longest", "--autotune", "0"], "--longest cannot be combined with --autotune"),
        (["gpt2", "--longest", "--largest_batch"], "not allowed with argument --longest"),
        (["gpt2", "--longest", "--block_size", "64"], "--longest cannot be combined with --block_size"),
        (["gpt2", "--longest", "--global_batch_size", "64"], "--longest cannot be combined with --global_batch_size"),
        (["gpt2", "--longest", "--autotune", "2"], "--longest cannot be combined with --autotune"),
        (["gpt2", "--gpus_per_node", "8", "--sequence_parallel_size", "8"], "does not divide .* 12 attention heads"),
        (["resnet-50", "--longest"], "recipes/image_cls.py reads no text"),
        (
            ["gpt2", "--largest_batch", "--per_device_train_batch_size", "4"],
            "cannot be combined with --per_device",
        ),
        ([POST, "--largest_batch", "--layouts", "pipeline"], "Give --pipeline_parallel_size N instead"),
        (["gpt2", "--largest_model"], "--largest_model searches the known models, but gpt2 names one"),
        (["--largest_model", "--model_name_or_path", "gpt2"], "cannot be combined with --model_name_or_path"),
        (["gpt2", "--largest_model", "--recipe", "image_cls"], "searches the known models"),
        (["gpt2", "--recipe", "image_cls"], "recipes/image_cls.py does not train text models"),
        (["Mixtral-8x7B-v0.1", "--tiled_mlp_num_shards", "4"], "a mixture may not reach every expert"),
        (["gpt2", "--tiled_mlp_num_shards", "4"], "its MLPs have dropout"),
        (["resnet-50", "--recipe", "embedding"], "a resnet reads no text. Plan it with --recipe image_cls"),
        pytest.param(
            ["--largest_model", "--block_size", "99999999"],
            r"can train none of the \d+ known models. For example, \S+: --block_size is 99999999",
            marks=pytest.mark.nightly,
        ),
        (
            ["Llama-2-7b", "--gpu", "T4", "--no_search", "--longest"],
            "nothing fits on T4.*let the plan choose the layout",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said


def test_a_config_that_check_refuses_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_sise": 5}}')
    assert main(["plan", "gpt2", "--deepspeed", str(tmp_path / "ds.json")]) == 2
    assert "reduce_bucket_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": ["a"]},
        {"model_type": "gpt2", "n_positions": "x", "vocab_size": 300, "n_embd": 8, "n_layer": 1, "n_head": 2},
    ],
)
def test_a_config_that_is_none_is_refused(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("finetune: ")


def test_a_pipeline_of_one_stage_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    job = planned(capsys, "--model_size", "tiny", "--pipeline_parallel_size", "1", "--no_search")["job"]
    assert (job["engine"], job["stages"]) == ("pipeline", 1)


def test_what_was_asked_is_among_the_layouts_and_what_fails_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "gemma-2b",
        "--gpu",
        "L4",
        "--per_device_train_batch_size",
        "12",
        "--deepspeed",
        "zero3",
        "--block_size",
        "512",
    )
    found = planned(capsys, *words, "--activation_checkpoint_interval", "1")
    fitting = [one for one in found["layouts"] if one["why_not"] is None]
    failing = [one for one in found["layouts"] if one["why_not"] is not None]
    assert any(one["layout"] == "zero3" and one["job"]["micro_batch"] == 12 for one in fitting)
    assert failing
    assert all(one["peak_bytes"] > found["limit_bytes"] or one["host_bytes"] for one in failing)
    for one in failing:
        same = [other for other in fitting if other["layout"] == one["layout"]]
        assert all(other["job"]["checkpoint_interval"] != one["job"]["checkpoint_interval"] for other in same)


def test_json_is_json_whatever_else_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "gpt2", "--gpu", "T4", "--json", "--write", str(tmp_path / "ds.json")]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["layouts"]
    assert "wrote" in said.err


def test_a_key_that_is_misspelt_is_refused_as_the_recipe_refuses_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: gpt2\nblok_size: 64\n")
    assert main(["plan", str(path), "--no_search"]) == 2
    said = capsys.readouterr().err
    assert f"--blok_size ({path} line 2): recipes/causal_lm.py has no such flag. Did you mean --block_size?" in said


@pytest.mark.parametrize(
    ("lines", "words", "recipe", "is_said"),
    [
        ("recipe: seq_cls", [], "seq_cls", False),
        ("task: regression", [], "seq_cls", False),
        ("max_seq_length: 64", [], "seq_cls", True),
        ("model_size: base", [], "seq_cls", True),
        ("learning_rate: 1e-4", [], "causal_lm", True),
        ("learning_rate: 1e-4", ["--recipe", "seq_cls"], "seq_cls", False),
        ("model_name_or_path: bert-base-uncased", [], "seq_cls", True),
        ("model_name_or_path: resnet-18", [], "image_cls", True),
        ("model_size: tiny", ["--pipeline_parallel_size", "1"], "causal_lm_pipeline", True),
        ("recipe: causal_lm", ["--pipeline_parallel_size", "1"], "causal_lm_pipeline", False),
        ("cifar_dir: x", [], "image_cls", False),
        ("train_file: own.conll", [], "token_cls", True),
        ("validation_file: own.IOB2", ["--max_steps", "3"], "token_cls", True),
        ("train_file: own.csv", [], "causal_lm", True),
    ],
)
def test_the_recipe_is_the_one_named_or_the_likeliest_that_takes_the_flags(
    lines: str, words: list[str], recipe: str, is_said: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{lines}\n")
    named = words[1] if "--recipe" in words else None
    run, notes = described(["--config", str(path), *(words if not named else [])], Launch(), named)
    assert run.recipe.name == recipe
    assert bool(notes) == is_said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "token_cls"], "a vocabulary of 8,000 tokens and 2 labels are assumed"),
        (["gpt2", "--recipe", "token_cls"], "2 labels are assumed"),
        (["gpt2"], "fp32 is assumed, as for any CPU; a run uses bf16"),
        (["gpt2", "--train_file", "a.conll"], "recipes/token_cls.py trains it, the one that reads tagged words"),
        (["gpt2", "--max_seq_length", "64"], "trains it, because recipes/causal_lm.py has no --max_seq_length"),
        (["bert-base-uncased", "--max_seq_length", "64"], "seq_cls.py trains it, the likeliest that has these flags"),
    ],
)
def test_what_is_assumed_is_said(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    notes = planned(capsys, *words, "--no_search")["notes"]
    assert len([note for note in notes if said in note]) == 1


def test_gpt2_for_tags_has_their_head_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "gpt2", "--recipe", "token_cls", "--no_search")["job"]["parameters"] == 124_439_808 + 2 * 769


@pytest.mark.parametrize(
    "words",
    [
        "--per_device_train_batch_size 1000000000",
        "--block_size 5000",
        "--config_overrides foo=1",
        "--fsdp offload --nodes 2",
        "--max_steps abc",
        "--model_type alexnet",
    ],
)
def test_a_recipes_flag_is_refused_with_its_source(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flag, value, *others = words.split()
    (tmp_path / "run.yaml").write_text(f"{flag[2:]}: {value}\n")
    assert main(["plan", str(tmp_path / "run.yaml"), *others]) == 2
    said = capsys.readouterr().err
    assert f"{flag}" in said
    assert "run.yaml line 1)" in said


def test_the_recipe_of_a_run_is_planned_with_the_model_that_the_run_has_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text("train_dir: photos\nmodel_size: tiny\nper_device_train_batch_size: 8\n")
    before = planned(capsys, str(tmp_path / "recipe.yaml"), "--no_search")
    assert any("images are counted as 224 pixels" in note for note in before["notes"]), "it ended before it kept one"
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "resnet", "architectures": ["ResNetForImageClassification"], "hidden_sizes": [16, 32],
        "depths": [1, 1], "layer_type": "basic", "embedding_size": 16, "num_channels": 3,
    }))  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 32}}')
    job = planned(capsys, str(tmp_path / "recipe.yaml"), "--no_search")["job"]
    assert (job["model"], job["micro_batch"]) == ("resnet", 8)
    assert job["parameters"] < before["job"]["parameters"]
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": "x"}}')
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    assert "preprocessor_config.json: height is 'x', but it must be a whole number" in capsys.readouterr().err


def test_a_row_for_each_stage_is_whole_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        main(["plan", POST, "--gpu", "H100-80GB", "--pipeline_parallel_size", "16", "--nodes", "2", "--no_search"]) == 0
    )
    rows = capsys.readouterr().out.partition("All of them")[2].splitlines()
    assert [row.split()[1] for row in rows if row.startswith("stage ")] == [str(stage) for stage in range(16)]
    assert any(row.rstrip().endswith("of blocks.11") for row in rows)


def test_a_precision_that_is_faster_is_found_unless_one_was_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A machine whose bf16 is emulated: a plan in bf16 by the recipes' rule, and the search finds fp32."""
    values = json.loads((REPO / "finetune/plan/machines/A100-40GB.json").read_text())
    values["peak_flops"]["bf16"] = values["peak_flops"]["fp32"] / 4
    (tmp_path / "slow.json").write_text(json.dumps(values))
    words = ("gpt2", "--gpu", str(tmp_path / "slow.json"), "--gpus_per_node", "2")
    found = planned(capsys, *words)
    assert found["job"]["precision"] == "bf16"
    assert found["layouts"][0]["job"]["precision"] in ("fp32", "fp16")
    asked = planned(capsys, *words, "--bf16", "True")
    assert {one["job"]["precision"] for one in asked["layouts"]} == {"bf16"}


def test_the_advice_of_a_run_out_of_memory_is_the_plan_of_its_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a run's own process, whose environment `start` has changed for the libraries."""
    from finetune.run.launch import read_launch
    from finetune.training.guards import memory
    from finetune.training.guards.memory import advice

    monkeypatch.setattr(memory, "_host_limits", lambda: (2**40, memory.NO_LIMIT, memory.NO_LIMIT))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    words = ("recipe: seq_cls", "model_size: base", "deepspeed: zero2", "per_device_train_batch_size: 64")
    (tmp_path / "recipe.yaml").write_text("\n".join(words))

    def said_of(*given: Any) -> str:
        return re.sub(r"(room for|--host_memory) [\d.]+\d", r"\1 SIZE", advice(tmp_path, *given))  # as measured

    said = said_of()
    assert re.search(r"^Planned: [\d.]+ GiB .*--per_device_train_batch_size 32 ", said.replace("\n", " ")), said
    launch = read_launch()
    monkeypatch.setenv("WORLD_SIZE", "no number")
    assert said_of(launch) == said


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (2**40, r"The cheapest changes:\n  (?!--deepspeed zero3_nvme).*: \d"),  # it should have fitted
        (
            8 * 2**30,
            r"This would fit:\n  --deepspeed \w+ --per_device_train_batch_size \d+ .*: [0-7]\.\d+ GiB, [\d.]+ times",
        ),
        (2**28, "Nothing that was tried fits, but this takes less:\n"),
    ],
)
def test_the_advice_of_a_run_out_of_memory_is_what_fits_into_the_memory_that_is_here(
    host: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from finetune.training.guards import memory

    monkeypatch.setattr(memory, "_host_limits", lambda: (host, memory.NO_LIMIT, memory.NO_LIMIT))
    words = ("recipe: seq_cls", "model_size: base", "per_device_train_batch_size: 64", "max_seq_length: 512")
    (tmp_path / "recipe.yaml").write_text("\n".join(words))
    assert re.search(said, memory.advice(tmp_path)), memory.advice(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ("recipe: causal_lm_pipeline", "model_size: small", "pipeline_parallel_size: 1"),
        ("recipe: causal_lm", "model_name_or_path: gpt2", "dtype: bfloat16", "optim: stable_adamw", "bf16: true"),
    ],
    ids=["pipeline", "pure bf16"],
)
def test_the_advice_of_a_run_out_of_memory_names_no_layout_that_its_recipe_refuses(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from finetune.training.guards import memory

    monkeypatch.setattr(memory, "_host_limits", lambda: (2**30, memory.NO_LIMIT, memory.NO_LIMIT))
    words = (*words, "per_device_train_batch_size: 64")
    (tmp_path / "recipe.yaml").write_text("\n".join(words))
    said = memory.advice(tmp_path)
    assert re.search("This would fit|this takes less", said), said
    assert not re.search(r"zero\d", said), said


def test_a_cpu_without_bf16_is_planned_as_one_that_emulates_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpt2", "--no_search")
    whole, half = planned(capsys, *words), planned(capsys, *words, "--bf16", "True")
    assert half["ranks"][0]["peak"]["bytes"] != whole["ranks"][0]["peak"]["bytes"]
    assert [note for note in half["notes"] if "a CPU that emulates bf16 is several times slower" in note]
    assert main(["plan", *words, "--fp16", "True"]) == 2
    assert "cpu has no fp16" in capsys.readouterr().err


def test_the_room_for_tensors_does_not_depend_on_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be asked before its first step or, if the kernel killed another, in the middle of one."""
    import torch

    from finetune.plan.job import Job
    from finetune.plan.model import model_of
    from finetune.plan.named import find_model_config
    from finetune.training.guards import memory

    host = 2**34
    monkeypatch.setattr(memory, "_host_limits", lambda: (host, 2**45, memory.NO_LIMIT))
    model = model_of(find_model_config("gpt2"))
    machine = memory.with_host_memory(memory.find_machine("cpu"), host)

    def room(ranks: int) -> int:
        found = memory.plan(Job(model, device="cpu", world_size=ranks, ranks_per_node=ranks), machine)
        return memory._for_tensors(found).machine.host_memory_bytes

    alone, both = room(1), room(2)
    assert 2**28 < host - alone < 2**33  # this process's libraries
    assert both == pytest.approx(alone - (host - alone), abs=2**26)
    ballast = torch.ones(2**28)
    assert room(1) == pytest.approx(alone, abs=ballast.nbytes // 8)


def test_a_way_out_that_needs_a_flag_dropped_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpt2-xl", "--gpu", "T4", "--gpus_per_node", "1")
    found = planned(capsys, *words, "--activation_checkpoint_interval", "1")
    best = found["ways_out"][0]
    assert best["job"]["checkpoint_interval"] == 0
    flags = best["layout"].removesuffix(" without --activation_checkpoint_interval")
    assert flags != best["layout"]
    again = planned(capsys, *words, *flags.split(), "--no_search")
    assert again["ranks"][0]["peak"]["bytes"] == best["peak_bytes"]


def test_a_run_without_memory_for_its_own_advice_still_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from finetune.training.guards import memory

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(memory, "search", fails)
    monkeypatch.setattr(memory, "_host_limits", lambda: (2**30, memory.NO_LIMIT, memory.NO_LIMIT))
    words = ("recipe: seq_cls", "model_size: base", "per_device_train_batch_size: 64", "max_seq_length: 512")
    (tmp_path / "recipe.yaml").write_text("\n".join(words))
    said = str(memory.out_of_memory(MemoryError(), tmp_path))
    assert said.startswith("out of memory on rank 0: no memory. Measured: "), said
    assert "No plan could be made: no memory is left for it." in said


LORA_24GB = "recipes/configs/lora_24gb.yaml"
ONE_CARD = ("--gpu", "RTX4090", "--nodes", "1", "--gpus_per_node", "1")
LLAMA_3_8B = 8_030_261_248  # parameters, of which in linear layers of the blocks:
LINEAR_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


@pytest.mark.parametrize(
    ("words", "base"),
    [
        ((), 2 * LLAMA_3_8B),
        (("--dtype", "float32"), 4 * LLAMA_3_8B),
        (("--load_in_4bit", "True"), LINEAR_8B // 2 + 4 * LINEAR_8B // 64 + 2 * (LLAMA_3_8B - LINEAR_8B)),
        (
            ("--load_in_4bit", "True", "--bnb_4bit_use_double_quant", "True"),
            LINEAR_8B // 2
            + LINEAR_8B // 64
            + 4 * (LINEAR_8B // 64 // 256 + 32 * 7 * 257)
            + 2 * (LLAMA_3_8B - LINEAR_8B),
        ),
    ],
    ids=["in bf16", "in fp32", "in 4 bits", "in 4 bits with double quantization"],
)
def test_lora_of_eight_billion_is_planned_on_weights_as_they_are_kept(
    words: tuple[str, ...], base: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ("--model_name_or_path", "meta-llama/Meta-Llama-3-8B")
    found = planned(capsys, LORA_24GB, *name, *ONE_CARD, *words, "--no_search")
    adapters = found["job"]["parameters"] - LLAMA_3_8B
    assert found["ranks"][0]["resident"]["parameters"] == base + 4 * adapters
    assert found["ranks"][0]["resident"]["optimizer states"] == pytest.approx(8 * adapters, rel=1e-3)  # and counts
    assert found["fits"] == (base < 24e9)


TO_FIT = [
    ("Llama-2-7b", "RTX4090"),
    ("gpt2-xl", "T4"),
    ("Llama-3.2-1B", "A10G"),
    ("Qwen3-4B", "RTX5090"),
    ("phi-2", "L4"),
]


@pytest.mark.parametrize(("model", "gpu"), gate_has(TO_FIT[1:3], TO_FIT))
def test_what_is_said_to_fit_is_no_slower_than_any_layout_of_the_table(
    model: str, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        model,
        "--recipe",
        "causal_lm",
        "--gpu",
        gpu,
        "--nodes",
        "1",
        "--gpus_per_node",
        "1",
        "--block_size",
        "1024",
    ]
    words += ["--use_peft", "True"] if model == "Llama-2-7b" else []
    rates = [one["samples_per_second"] for one in planned(capsys, *words)["layouts"] if one["why_not"] is None]
    main(["plan", *words])
    said = " ".join(capsys.readouterr().out.split())
    first = re.search(r"too much\. fits with [^:]+: [\d.,]+ GiB.*?, ([\d.,]+) samples/s", said)
    assert first is not None, said
    assert float(first[1].replace(",", "")) >= 0.999 * max(rates)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("unsloth/Qwen3-8B-Base",), ["Qwen3-8B-Base: planned as Qwen3-8B"]),
        (("Qwen/Qwen3-8B",), []),
        (("unsloth/Qwen3-8B-bnb-4bit",), ["Qwen3-8B-bnb-4bit: planned as Qwen3-8B", "its weights are planned"]),
        (
            ("Qwen3-8B-bnb-4bit", "--use_peft", "True", "--load_in_4bit", "True"),
            ["Qwen3-8B-bnb-4bit: planned as Qwen3-8B"],
        ),
        (("google/gemma-3-4b-pt",), ["only its text part is planned"]),
    ],
    ids=["another stage", "the hub's id", "packed", "packed and planned so", "left out"],
)
def test_a_plan_says_which_known_model_a_name_was_taken_for(
    words: tuple[str, ...], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, *words, "--recipe", "causal_lm", "--gpu", "H100", "--block_size", "512", "--no_search")
    notes = [note for note in found["notes"] if "planned" in note]
    assert len(notes) == len(said)
    assert all(note.startswith(begin) for note, begin in zip(notes, said, strict=True))


@pytest.mark.parametrize(
    ("name", "more", "is_chunked"),
    [("Qwen3-30B-A3B", {}, True), ("gpt-oss-20b", {}, True), ("gemma-2-2b", {}, False),
     ("Qwen3-30B-A3B", {"output_router_logits": True}, True)],
)  # fmt: skip
def test_a_loss_is_whole_where_more_than_a_linear_head_makes_it(
    name: str, more: dict[str, Any], is_chunked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As finetune.models.chunked_loss finds out of the real ones: the routers' part is added beside it."""
    (tmp_path / "config.json").write_text(json.dumps(find_model_config(name) | more))
    found = planned(
        capsys, str(tmp_path), "--recipe", "causal_lm", "--gpu", "H100", "--block_size", "512", "--no_search"
    )
    assert bool(found["job"]["loss_chunk_tokens"]) == is_chunked


@pytest.mark.parametrize(
    ("words", "bytes_of_states"),
    [(("--dtype", "bfloat16", "--optim", "stable_adamw"), 6), (("--dtype", "pure_bfloat16"), 4)],
    ids=["Kahan", "pure"],
)
def test_training_in_bf16_alone_is_planned_without_masters(
    words: tuple[str, ...], bytes_of_states: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each parameter two bytes, as many of its gradient, and the states; no cast of a weight is kept."""
    common = ("--bf16", "True", "--block_size", "1024", "--per_device_train_batch_size", "1", "--no_search")
    plain, found = (planned(capsys, "Llama-3.1-8B", *ONE_CARD, *common, *more) for more in ((), words))
    resident, masters = (one["ranks"][0]["resident"] for one in (found, plain))
    assert masters["parameters"] == 4 * LLAMA_3_8B
    assert resident["parameters"] == 2 * LLAMA_3_8B
    assert resident["optimizer states"] == pytest.approx(bytes_of_states * LLAMA_3_8B, rel=1e-6)
    assert "without masters" in " ".join(found["notes"])


def test_lora_of_qwen3_fits_a_card_of_24_gb(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, LORA_24GB, "--model_name_or_path", "Qwen3-8B", *ONE_CARD, "--no_search")["fits"]


@pytest.mark.parametrize("flag", ["load_in_4bit", "lora_use_dora"])
def test_what_cannot_be_sharded_is_neither_planned_nor_proposed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["Llama-3.2-1B", "--recipe", "causal_lm", "--use_peft", "True", f"--{flag}", "True", "--gpu", "A100-80GB"]
    assert main(["plan", *words, "--deepspeed", "zero3"]) == 2
    assert "ZeRO-3 and FSDP shard weights" in capsys.readouterr().err
    layouts = {one["layout"] for one in planned(capsys, *words)["layouts"]}
    assert {"none", "zero1", "zero2"} <= layouts
    assert not any("zero3" in layout for layout in layouts)


DEEPSEEK = ("DeepSeek-V3", "--gpu", "H200", "--nodes", "16", "--gpus_per_node", "8", "--deepspeed", "zero3",
            "--block_size", "4096", "--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1",
            "--activation_checkpointing", "True", "--no_search")  # fmt: skip


def test_deepseek_v3_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 weights and gradients, fp32 masters, and Adam's states: 16 bytes per parameter, over 128 ranks."""
    found = planned(capsys, *DEEPSEEK)
    parameters = 671_026_404_352
    assert found["job"]["parameters"] == parameters
    assert found["fits"]
    states = ("parameters", "master weights", "optimizer states", "gradients")
    held = sum(found["ranks"][0]["resident"][kind] for kind in states)
    assert held == pytest.approx(16 * parameters / 128, rel=1e-3)
    layer = 256 * 3 * 7168 * 2048 * 2  # a layer's experts, gathered in bf16
    assert layer < found["ranks"][0]["peak"]["by_kind"]["gathered parameters"] < 2 * layer


def test_adapters_of_deepseek_v3_are_those_that_a_run_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """All linear layers but those whose names peft takes for the experts' tensors: MLPs, and shared experts."""
    sides = ((7168, 1536), (1536, 128 * 192), (7168, 512 + 64), (512, 128 * 256), (128 * 128, 7168))
    adapted = planned(capsys, *DEEPSEEK, "--use_peft", "True")["job"]["parameters"] - 671_026_404_352
    assert adapted == 61 * 16 * sum(map(sum, sides))
    for name, said in (("gate_proj", "peft takes this name"), ("down_proj", "trained, but not planned")):
        assert main(["plan", *DEEPSEEK, "--use_peft", "True", "--lora_target_modules", "q_a_proj", name]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sequence_parallel_size", "4"), "differ in size (192 and 128)"),
        (("--tiled_mlp_num_shards", "4"), "may not reach every expert"),
    ],
)
def test_what_a_run_of_deepseek_v3_refuses_a_plan_refuses(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *DEEPSEEK, *words]) == 2
    assert said in capsys.readouterr().err


def test_layouts_to_search_are_refused_without_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "--no_search", "--layouts", "zero3"]) == 2
    assert "--layouts needs the search, but --no_search turns it off. Drop one." in capsys.readouterr().err


def test_a_global_batch_for_the_search_is_told_from_the_runs_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpt2", "--gpu", "T4", "--gpus_per_node", "2", "--per_device_train_batch_size", "2")
    for more in ((), ("--no_search",)):
        other = planned(capsys, *words, "--global_batch_size", "128", *more)["notes"]
        assert [note for note in other if "the plan is of the run's own 4 samples per step" in note]
    for same in ((), ("--global_batch_size", "4")):
        assert not any("samples per step" in note for note in planned(capsys, *words, *same)["notes"])


def test_a_path_that_is_not_there_is_not_taken_for_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_llama").mkdir()
    assert main(["plan", str(tmp_path / "own_lama")]) == 2
    said = capsys.readouterr().err
    assert "there is no such folder or file." in said
    assert "own_llama" in said
    assert "Known models" not in said


def test_a_plan_that_fills_the_host_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("Llama-2-13b", "--gpu", "A100-80GB", "--gpus_per_node", "1", "--deepspeed", "zero3_offload",
             "--per_device_train_batch_size", "1", "--no_search")  # fmt: skip
    host = planned(capsys, *words)["ranks"][0]["host"]
    for share, is_said in ((0.95, True), (0.5, False)):
        notes = planned(capsys, *words, "--host_memory", f"{sum(host.values()) / 2**30 / share * 1.13:.2f}")["notes"]
        assert any("of a node's host memory; the system" in note for note in notes) == is_said, (host, notes)


def test_a_recipe_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model_name_or_path", "gpt2", *ONE_CARD, "--no_search")
    assert planned(capsys, "seq_cls", *words) == planned(capsys, "--recipe", "seq_cls", *words)
    assert planned(capsys, "image_cls", "--no_search")["job"]["model"] == "resnet"


def test_an_adapter_whose_base_is_not_there_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "models/gone"}))
    assert main(["plan", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (
        f"{tmp_path}, an adapter of models/gone: there is no such folder, and no model is known by this name." in said
    )
    assert "as base_model_name_or_path" in said
    assert "Known models" not in said


def test_an_adapters_folder_is_planned_on_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = {"base_model_name_or_path": "Llama-3.2-1B", "r": 8, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    words = ("--recipe", "causal_lm", "--use_peft", "True", *ONE_CARD, "--no_search")
    there = planned(capsys, str(tmp_path), *words)["job"]["parameters"]
    named = planned(capsys, "Llama-3.2-1B", *words, "--lora_r", "8", "--lora_target_modules", "q_proj", "v_proj")
    assert there == named["job"]["parameters"]
    assert main(["plan", str(tmp_path), *words, "--lora_r", "4"]) == 2
    assert "the adapter in --model_name_or_path sets its own. Drop it." in capsys.readouterr().err
    config = tmp_path / "new.yaml"
    config.write_text("lora_r: 4\n")
    found = planned(capsys, str(tmp_path), *words, "--config", str(config))
    assert found["job"]["parameters"] == there
    assert any(note.startswith("lora_r of --config") for note in found["notes"])


JSON_KEYS = {
    "": "schema answer cost one_more job machine fits limit_bytes device_bytes ranks step_seconds parts seconds "
    "samples_per_second notes ways_out layouts",
    "answer": "question found next flags hours options",
    "options": "found layout job peak_bytes host_bytes step_seconds samples_per_second why_not",
    "cost": "steps is_told hours gpu_hours price_per_gpu_hour price most_kwh error",
    "one_more": "world_size speedup peak_bytes fits",
}


def test_the_json_keys_are_stable_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs read them: add a new key here and in docs/plan.md, and increment the schema if you remove one."""
    words = ("--gpu", "T4", "--gpus_per_node", "1", "--price_per_gpu_hour", "0.5", "--one_more_gpu")
    found = planned(capsys, "gpt2", *words, "--largest_batch", "--layouts", "none", "zero2")
    (option, *_) = found["answer"]["options"]
    parts = {"": found, "options": option, **{name: found[name] for name in ("answer", "cost", "one_more")}}
    assert {name: " ".join(part) for name, part in parts.items()} == JSON_KEYS
    assert found["schema"] == 1
    page = (REPO / "docs/plan.md").read_text()
    assert not [key for keys in JSON_KEYS.values() for key in keys.split() if f"`{key}`" not in page]
    assert found["ways_out"] == []
    too_large = planned(capsys, "Llama-2-7b", "--gpu", "T4", "--gpus_per_node", "1", "--no_search")
    assert too_large["ways_out"][0].keys() == option.keys() - {"found"}
    without = planned(capsys, "gpt2", "--gpu", "T4", "--no_search")
    assert [without[name] for name in ("answer", "cost", "one_more", "layouts")] == [None] * 4
    assert list(without) == JSON_KEYS[""].split()


@pytest.mark.parametrize(
    ("words", "layouts"),
    [
        (("--gpu", "T4"), ("--layouts", "none", "zero2", "zero3")),
        (("--gpu", "A100-80GB", "--dtype", "pure_bfloat16"), ()),
    ],
    ids=["masters", "no masters"],
)
def test_the_flags_of_an_answer_select_its_plan(
    words: tuple[str, ...], layouts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("gpt2", "--gpus_per_node", "2", *words)
    found = planned(capsys, *words, "--largest_batch", *layouts)
    assert layouts or {one["layout"] for one in found["answer"]["options"]} == {"none"}, "DeepSpeed refuses the dtype"
    again = planned(capsys, *words, *found["answer"]["flags"].split(), "--no_search")
    assert found["job"]["micro_batch"] == found["answer"]["found"]
    assert (again["job"], again["ranks"]) == (found["job"], found["ranks"])
    assert again["fits"]
    flags = found["answer"]["flags"].replace(f"size {found['answer']['found']}", f"size {found['answer']['next']}", 1)
    assert not planned(capsys, *words, *flags.split(), "--no_search")["fits"]


def test_a_question_keeps_the_layout_that_the_run_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("Llama-3.2-1B", "--gpu", "RTX4090", "--gpus_per_node", "1", "--longest")
    asked = planned(capsys, *words, "--deepspeed", "zero2_offload")["answer"]
    every = planned(capsys, *words)["answer"]
    assert [one["layout"] for one in asked["options"]] == ["as asked"]
    assert len(every["options"]) >= 4
    assert every["found"] >= asked["found"]
    assert "zero3_nvme" not in {one["layout"] for one in every["options"]}, "the machine may have no fast disk"
    disk = planned(capsys, "gpt2", *words[1:], "--nvme_path", "/nowhere")["answer"]
    assert "zero3_nvme" in {one["layout"] for one in disk["options"]}
    pipeline = planned(capsys, POST, "--gpu", "T4", "--pipeline_parallel_size", "2", "--largest_batch")
    assert (pipeline["job"]["stages"], pipeline["fits"]) == (2, True)


def test_the_length_of_a_yaml_is_no_obstacle_to_the_longest(capsys: pytest.CaptureFixture[str]) -> None:
    """recipes/configs/lora_24gb.yaml asks for 2,048 tokens; gpt2 reads 1,024."""
    words = ("--config", "recipes/configs/lora_24gb.yaml", "--longest", *ONE_CARD)
    assert planned(capsys, "gpt2", *words)["answer"]["found"] == 1024


def test_the_longest_may_be_the_models_own_maximum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**find_model_config("gpt2"), "n_positions": 1000}))
    answer = planned(capsys, str(tmp_path), "--longest", "--layouts", "none", *ONE_CARD)["answer"]
    assert (answer["found"], answer["next"]) == (1000, None)


def test_t5_reads_more_than_it_was_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--recipe", "seq2seq", "--max_source_length", "1024", "--no_search", *ONE_CARD)
    assert planned(capsys, "t5-large", *words)["job"]["tokens"] == 1024


@pytest.mark.parametrize("disk", [(), ("--nvme_path", "/disk")])
def test_a_folder_that_the_run_names_is_not_asked_for_again(
    disk: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "gpt2", "--largest_batch", "--layouts", "zero3_nvme", *disk, *ONE_CARD)
    assert ("--nvme_path" in found["answer"]["flags"]) == (not disk)


def test_the_largest_model_needs_no_model_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--largest_model", "--gpu", "T4", "--gpus_per_node", "1", "--layouts", "none")
    found = planned(capsys, *words)
    assert found["job"]["model"] in ("llama", "qwen2", "gemma", "gpt2")
    named = planned(capsys, *words[1:5], *found["answer"]["flags"].split(), "--no_search")
    assert (named["job"], named["fits"]) == (found["job"], True)


@pytest.mark.nightly
def test_the_largest_model_with_an_adapter_is_larger_and_that_of_pictures_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--largest_model", "--gpu", "T4", "--gpus_per_node", "1", "--layouts", "none")
    found = planned(capsys, *words)
    adapted = planned(capsys, *words, "--use_peft", "True")
    assert adapted["job"]["parameters"] > 2 * found["job"]["parameters"]
    vision = planned(capsys, *words, "--recipe", "image_cls")
    assert (vision["answer"]["found"], vision["answer"]["next"]) == ("resnet-50", None)


def test_an_answer_comes_first_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    words = ["plan", "gpt2", "--gpu", "A100-80GB", "--max_steps", "20000"]
    assert main([*words, "--deadline", "3", "--layouts", "zero1", "--price_per_gpu_hour", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.match(
        r"The smallest cluster for the deadline: \d+ rank\(s\) in [\d.]+ hours, 128 samples per step \(zero1", said[0]
    )
    assert any(line.startswith("20,000 steps cost about ") for line in said)
    assert main([*words, "--no_search"]) == 0
    assert capsys.readouterr().out.startswith("It fits: ")


def test_a_table_of_all_stages_names_each_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = "--pipeline_parallel_size 4 --config_overrides num_experts=8 --gpus_per_node 4 --no_search".split()
    assert main(["plan", "--recipe", "causal_lm_pipeline", *words]) == 0
    table = capsys.readouterr().out.partition("All of them")[2].partition("Step time")[0]
    assert "at rest  at peak  headroom" in table
    assert re.findall(r"^stage (\d)  \d", table, re.MULTILINE) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("more", "said"), [([], True), (["--activation_checkpoint_interval", "1"], False)])
def test_a_batch_of_a_fixed_layout_says_that_checkpointing_was_not_tried(
    more: list[str], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "gpt2", "--gpu", "T4", "--gpus_per_node", "1", "--deepspeed", "zero2", "--largest_batch", *more]
    assert main(words) == 0
    assert ("Activation checkpointing was not tried." in " ".join(capsys.readouterr().out.split())) == said
