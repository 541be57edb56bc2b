"""LoRA of classifiers, and folders of adapters as models: trained alike everywhere, opened, evaluated, gone on with."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finished, gate_has, launch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from finetune.cli import main
from finetune.errors import RequestError
from finetune.models.adapters import check_adapter, with_adapter
from finetune.models.classifier import find_source
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments
from finetune.run.launch import Launch
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.resolve import resolve

pytest.importorskip("peft", reason="peft (extra peft) is not installed")
pytestmark = pytest.mark.usefixtures("built_ops")

SHORT = {
    "max_steps": 6,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "max_train_samples": 120,
    "max_eval_samples": 40,
    "max_seq_length": 24,
    "group_by_length": False,
    "bf16": False,
}
LORA = {"use_peft": True, "lora_r": 4, "merge_adapter": True}
RECIPES = ("seq_cls", "token_cls")
KINDS = {"seq_cls": "AutoModelForSequenceClassification", "token_cls": "AutoModelForTokenClassification"}
FIGURES = {"seq_cls": ("eval_loss", "eval_accuracy"), "token_cls": ("eval_loss", "eval_f1")}


def train(recipe: str, folder: Path, values: dict[str, Any], ranks: int = 1, check: bool = True) -> Finished:
    launcher = "torchrun" if ranks > 1 else "python"
    return launch(launcher, folder, {**SHORT, **values}, ranks=ranks, recipe=f"recipes/{recipe}.py", check=check)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        recipe: train(recipe, folder / recipe, {"dropout": 0.0}).folder for recipe in RECIPES
    }  # which ranks draw apart


@pytest.fixture(scope="module")
def adapted(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder, values = tmp_path_factory.mktemp("adapted"), {**LORA, "per_device_train_batch_size": 8}
    return {
        recipe: train(recipe, folder / recipe, {**values, "model_name_or_path": bases[recipe]}) for recipe in RECIPES
    }


@pytest.mark.parametrize("recipe", gate_has("seq_cls", RECIPES))
def test_a_classifiers_adapter_has_its_head_and_labels_and_is_merged_as_it_is(
    recipe: str, bases: dict[str, Path], adapted: dict[str, Finished], tmp_path: Path
) -> None:
    import transformers

    run = adapted[recipe]
    assert not (run.folder / "model.safetensors").exists()
    saved = load_file(run.folder / "adapter_model.safetensors")
    whole = load_file(bases[recipe] / "model.safetensors")
    assert sum(weight.numel() for weight in saved.values()) < 0.2 * sum(weight.numel() for weight in whole.values())
    heads = [name for name in whole if not name.startswith("distilbert.")]
    assert heads
    for name in heads:
        assert not torch.equal(saved[f"base_model.model.{name}"], whole[name])
    auto = getattr(transformers, KINDS[recipe])
    names = {int(key): name for key, name in run.json("labels.json")["id2label"].items()}
    assert names == transformers.AutoConfig.from_pretrained(bases[recipe]).id2label
    ids = transformers.AutoTokenizer.from_pretrained(run.folder)("Return the path.", return_tensors="pt")
    with torch.no_grad():
        beside = auto.from_pretrained(run.folder, id2label=names).eval()(**ids).logits
        merged = auto.from_pretrained(run.folder / "merged").eval()(**ids).logits
        before = auto.from_pretrained(bases[recipe]).eval()(**ids).logits
    assert torch.allclose(beside, merged, atol=1e-4)
    assert main(["export", str(run.folder), str(tmp_path / "whole"), "--merge_adapter"]) == 0
    with torch.no_grad():
        exported = auto.from_pretrained(tmp_path / "whole").eval()(**ids)
    assert torch.allclose(exported.logits, merged, atol=1e-4)
    opened = re.search(r"```python\n(.*?)```", (run.folder / "README.md").read_text(), re.DOTALL)
    assert opened
    program = opened[1].replace("path/to/this/folder", str(run.folder))
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not torch.allclose(before, merged, atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapters_folder_is_evaluated_as_its_run_was(
    recipe: str, adapted: dict[str, Finished], tmp_path: Path
) -> None:
    run = adapted[recipe]
    again = train(recipe, tmp_path / "again", {"do_train": False, "model_name_or_path": run.folder})
    for name in FIGURES[recipe]:
        assert again.json("eval_results.json")[name] == pytest.approx(run.json("eval_results.json")[name], abs=1e-6)
    assert "an adapter of" in again.output


EVERYWHERE = [(recipe, config) for recipe in RECIPES for config in ("none", "zero1", "zero2", "zero3", "fsdp")]


@pytest.mark.parametrize(("recipe", "config"), gate_has([("seq_cls", "zero3"), ("token_cls", "zero2")], EVERYWHERE))
def test_classifiers_adapters_train_alike_everywhere(
    recipe: str, config: str, bases: dict[str, Path], adapted: dict[str, Finished], tmp_path: Path
) -> None:
    engine = {"fsdp": True} if config == "fsdp" else {"deepspeed": config}
    values = {**LORA, "model_name_or_path": bases[recipe], "per_device_train_batch_size": 4, **engine}
    run, truth = train(recipe, tmp_path / "run", values, ranks=2), adapted[recipe]
    for name in ("loss", "grad_norm"):
        assert run.column(name) == pytest.approx(truth.column(name), rel=2e-3)
    assert run.json("eval_results.json")["eval_loss"] == pytest.approx(
        truth.json("eval_results.json")["eval_loss"], rel=2e-3
    )
    assert load_file(run.folder / "merged" / "model.safetensors").keys()


def test_an_adapter_is_resumed_as_it_was_and_trained_further(
    bases: dict[str, Path], adapted: dict[str, Finished], tmp_path: Path
) -> None:
    values = {**LORA, "model_name_or_path": bases["seq_cls"], "per_device_train_batch_size": 8}
    saving = {**values, "save_strategy": "steps", "save_steps": 3}
    first = train("seq_cls", tmp_path / "run", saving)
    weights = load_file(first.folder / "adapter_model.safetensors")
    shutil.rmtree(first.folder / "checkpoint-6")
    resumed = train("seq_cls", tmp_path / "run", {**saving, "resume": "auto"})
    assert len(resumed.steps) == 6
    again = load_file(resumed.folder / "adapter_model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    further = {"use_peft": True, "model_name_or_path": first.folder, "max_steps": 1, "learning_rate": 1e-4}
    on = load_file(train("seq_cls", tmp_path / "on", further).folder / "adapter_model.safetensors")
    assert on.keys() == weights.keys()
    assert all(torch.allclose(on[name], weight, rtol=0, atol=2e-4) for name, weight in weights.items())
    assert not all(torch.equal(on[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "which is an adapter. Add --use_peft True to train it further"),
        ({"use_peft": True, "lora_r": 8}, "the adapter in --model_name_or_path sets its own"),
    ],
    ids=["in full", "another rank"],
)
def test_what_an_adapters_folder_cannot_be_is_said(
    values: dict[str, Any], message: str, adapted: dict[str, Finished], tmp_path: Path
) -> None:
    asked = {"model_name_or_path": adapted["seq_cls"].folder, **values}
    run = train("seq_cls", tmp_path / "run", asked, check=False)
    assert run.status == 2
    assert re.search(message, run.errors[0])


def test_an_adapter_whose_base_is_gone_names_both(adapted: dict[str, Finished], tmp_path: Path) -> None:
    folder = shutil.copytree(adapted["seq_cls"].folder, tmp_path / "adapter")
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "/gone"}))
    run = train("seq_cls", tmp_path / "run", {"do_train": False, "model_name_or_path": folder}, check=False)
    assert run.status == 2
    assert f"{folder}, an adapter of /gone: there is no such folder. This is the adapter's base model" in run.errors[0]


@pytest.mark.parametrize("adapter", [None, Path("adapter")], ids=["new", "trained further"])
def test_an_adapter_names_the_folder_of_its_base_by_an_absolute_path(
    adapter: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    monkeypatch.chdir(tmp_path)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)).save_pretrained("base")
    base = GPT2LMHeadModel.from_pretrained("base")
    if adapter:
        get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(adapter)
        assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    with_adapter(base, AdapterArguments(use_peft=True), adapter, "CAUSAL_LM").save_pretrained("made")
    written = json.loads(Path("made/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")


def test_the_lines_of_a_config_yield_to_the_adapters_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("use_peft: true\nlora_r: 16\nlora_target_modules: [all-linear]\n")
    words = ["--model_name_or_path", str(tmp_path), "--config", str(tmp_path / "mine.yaml")]
    (note,) = check_adapter(resolve(SEQ_CLS, words, Launch()), tmp_path)
    assert note.startswith(f"note: lora_r, lora_target_modules of --config {tmp_path}/mine.yaml do not apply")
    with pytest.raises(RequestError, match=r"--lora_r is 8 \(command line\), but the adapter"):
        check_adapter(resolve(SEQ_CLS, [*words, "--lora_r", "8"], Launch()), tmp_path)


def test_an_adapter_whose_base_is_no_folder_is_not_told_to_train_a_small_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "gone"}))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(
        RequestError, match=r"an adapter of gone: cannot be loaded; .* as base_model_name_or_path"
    ) as it:
        find_source(ModelArguments(model_name_or_path=str(tmp_path)), None)
    assert "from scratch" not in str(it.value)


LANGUAGE = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no", "learning_rate": 1e-2,
            "warmup_steps": 0, "sample_tokens": 4, "max_train_samples": 60, "bf16": False, "packing": "none",
            "group_by_length": False, "per_device_train_batch_size": 8, "max_eval_samples": 8}  # fmt: skip
SHAPE = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=64"


def write(folder: Path, values: dict[str, Any], ranks: int = 1, check: bool = True) -> Finished:
    launcher, every = "torchrun" if ranks > 1 else "python", {**LANGUAGE, **values}
    return launch(launcher, folder, every, ranks=ranks, recipe="recipes/causal_lm.py", check=check)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("writer") / "run", {"config_overrides": SHAPE}).folder


KINDS_OF_LORA = {
    "DoRA": {"lora_use_dora": True},
    "rsLoRA": {"lora_use_rslora": True, "lora_target_modules": ["all-linear"]},
    "a head": {"lora_modules_to_save": ["lm_head", "tokens"], "lora_target_modules": ["qkv"]},
}


@pytest.mark.parametrize("kind", gate_has(["DoRA", "a head"], list(KINDS_OF_LORA)))
def test_each_kind_of_adapter_is_pefts_and_is_evaluated_as_it_was_trained(
    kind: str, writer: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig

    values = {"use_peft": True, "lora_r": 4, "model_name_or_path": writer, **KINDS_OF_LORA[kind]}
    run = write(tmp_path / "run", values)
    config = LoraConfig.from_pretrained(str(run.folder))
    assert (config.use_dora, config.use_rslora) == (kind == "DoRA", kind == "rsLoRA")
    saved = load_file(run.folder / "adapter_model.safetensors")
    assert any("lora_magnitude_vector" in name for name in saved) == (kind == "DoRA")
    assert any(name.endswith("lm_head.weight") for name in saved) == (kind == "a head")
    again = write(tmp_path / "again", {"do_train": False, "model_name_or_path": run.folder})
    both = [one.json("eval_results.json")["eval_loss"] for one in (run, again)]
    assert both[0] == pytest.approx(both[1], abs=1e-6)
    assert both[0] != pytest.approx(json.loads((writer / "eval_results.json").read_text())["eval_loss"], abs=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["none", "zero1", "zero2"])
@pytest.mark.parametrize("kind", KINDS_OF_LORA)
def test_each_kind_of_adapter_trains_alike_on_two_ranks(kind: str, config: str, writer: Path, tmp_path: Path) -> None:
    values = {"use_peft": True, "lora_r": 4, "model_name_or_path": writer, **KINDS_OF_LORA[kind]}
    truth = write(tmp_path / "truth", values)
    run = write(tmp_path / "run", {**values, "per_device_train_batch_size": 4, "deepspeed": config}, ranks=2)
    assert run.column("loss") == pytest.approx(truth.column("loss"), rel=2e-3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_modules_to_save": ["lm_haed"]}, r"lm_haed: no module has this name\. The model has: .*lm_head"),
        ({"lora_modules_to_save": ["lm_head"], "loss_chunk_tokens": 16}, "has no linear head"),
    ],
    ids=["no such module", "a head in chunks"],
)
def test_modules_that_cannot_be_saved_are_said(
    values: dict[str, Any], message: str, writer: Path, tmp_path: Path
) -> None:
    run = write(tmp_path / "run", {"use_peft": True, "model_name_or_path": writer, **values}, check=False)
    assert run.status == 2
    assert re.search(message, run.errors[0])


def test_an_adapter_for_several_labels_a_row_keeps_its_thresholds(bases: dict[str, Path], tmp_path: Path) -> None:
    rows = [f'{{"text": "row {i} of many", "labels": {["a"] if i % 2 else ["a", "b"]}}}' for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows).replace("'", '"'))
    values = {"model_name_or_path": bases["seq_cls"], "train_file": tmp_path / "rows.jsonl", **LORA}
    run = train("seq_cls", tmp_path / "run", values)
    chosen = run.json("labels.json")["thresholds"]
    assert len(chosen) == 2
    assert run.json("merged/config.json")["thresholds"] == chosen
    assert run.json("labels.json")["text_columns"] == run.json("merged/config.json")["text_columns"] == ["text"]
    again = {"do_train": False, "model_name_or_path": run.folder, "validation_file": tmp_path / "rows.jsonl"}
    evaluated = train("seq_cls", tmp_path / "again", again)
    assert [row["threshold"] for row in evaluated.json("per_label.json")] == pytest.approx(chosen)


@pytest.mark.parametrize(
    "labels",
    ['{"id2label": {"x": "a"}}', '{"id2label": {"0": "a"}, "problem_type": "evil", "architectures": []}', "[]"],
)
def test_labels_that_no_run_has_written_are_refused(labels: str, adapted: dict[str, Finished], tmp_path: Path) -> None:
    folder = shutil.copytree(adapted["seq_cls"].folder, tmp_path / "adapter")
    (folder / "labels.json").write_text(labels)
    with pytest.raises(RequestError, match=r"labels\.json"):
        find_source(ModelArguments(model_name_or_path=str(folder)), None)
