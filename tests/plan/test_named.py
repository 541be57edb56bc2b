"""The models known by name: their published parameter counts, and the spellings that find them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import REPO
from transformers import CONFIG_MAPPING

import finetune.models.mlp  # noqa: F401 - it registers the MLP
from finetune.errors import RequestError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.plan import named
from finetune.plan.model import KINDS, model_of
from finetune.plan.named import TABLE, find_model, find_model_config, model_names
from finetune.run.sizes import GPTLITE_SIZES as SIZES

# In the hub's files, but no fields of the classes of transformers 5.23: T5's positions are relative, and
# modeling_qwen3_moe.py and modeling_glm4_moe.py ask for head_dim with getattr.
OF_THE_FILE = {"t5": {"n_positions"}, "qwen3_moe": {"head_dim"}, "phi3": {"partial_rotary_factor"},
               "glm4_moe": {"head_dim", "partial_rotary_factor"}}  # fmt: skip
ENTRIES: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
GPTLITES = [f"gptlite-{size}" for size in SIZES]
HUB = [name for name, entry in ENTRIES.items() if "hub" in entry]


def test_the_table_holds_well_known_models_and_our_own() -> None:
    assert model_names() == [*ENTRIES, *GPTLITES]
    assert len(HUB) >= 90
    assert {find_model_config(name)["model_type"] for name in model_names()} >= set(KINDS)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_config_gives_the_published_number_of_parameters(name: str) -> None:
    entry, config = ENTRIES[name], find_model_config(name)
    assert entry["count"] in ("exact", "within 1%")
    most = 0 if entry["count"] == "exact" else 0.01 * entry["parameters"]
    assert abs(model_of(config).parameters - entry["parameters"]) <= most


@pytest.mark.parametrize("name", [*ENTRIES, *GPTLITES])
def test_every_key_is_one_of_the_config_class(name: str) -> None:
    config = find_model_config(name)
    family = CONFIG_MAPPING[config.pop("model_type")]
    known = family(pad_token_id=0) if family.model_type == "phi3" else family()  # its default is outside a vocabulary
    assert {key for key in config if not hasattr(known, key)} <= OF_THE_FILE.get(family.model_type, set())
    heads = config.get("architectures", [])
    assert all(re.sub("Config$|TextConfig$", "", family.__name__) in head for head in heads)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_where_it_comes_from(name: str) -> None:
    entry = ENTRIES[name]
    assert entry["seen"]
    assert entry["source"] == f"huggingface.co/{entry['hub']} config.json" if "hub" in entry else entry["source"]
    organisation, _, plain = entry.get("hub", name).rpartition("/")
    words = plain.lower().split("-")
    assert all(word in words or name == "Mistral-Nemo-12B" for word in name.lower().split("-"))
    assert bool(organisation) == (name in HUB)


@pytest.mark.parametrize("name", HUB)
def test_a_model_is_found_in_any_case_with_or_without_its_organisation(name: str) -> None:
    config, hub = find_model_config(name), ENTRIES[name]["hub"]
    organisation, plain = hub.split("/")
    for spelling in (name.lower(), name.upper(), plain, hub, hub.lower(), f"{organisation}/{name}"):
        assert find_model_config(spelling) == config


def test_no_spelling_means_two_models() -> None:
    written = [
        {name.lower(), entry.get("hub", name).lower().rpartition("/")[2], *map(str.lower, entry.get("also", ()))}
        for name, entry in ENTRIES.items()
    ]
    spelled = [{form for one in spellings for form in named._forms(named._words(one))[:2]} for spellings in written]
    assert sum(map(len, written)) == len(set().union(*written))
    assert sum(map(len, spelled)) == len(set().union(*spelled))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("someone/gpt2", "gpt2"),
        ("gpt-2", "gpt2"),
        ("llama3.1:8b", "Llama-3.1-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b"),
        ("NousResearch/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("unsloth/llama-3-8b-bnb-4bit", "Meta-Llama-3-8B"),
        ("unsloth/gemma-3-4b-it-unsloth-bnb-4bit", "gemma-3-4b"),
        ("unsloth/DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit", "DeepSeek-R1-Distill-Llama-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo-12B"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen3-4B-2507"),
        ("Qwen/Qwen3-8B-Instruct-2612", "Qwen3-8B"),
        ("microsoft/Phi-4-mini-reasoning", "Phi-4-mini"),
        ("UNSLOTH/GPT-OSS-20B-BF16", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("unsloth/DeepSeek-V3.1-Base", "DeepSeek-V3.1"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "Moonlight-16B-A3B"),
        ("zai-org/GLM-4.5-Air-Base", "GLM-4.5-Air"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen1.5-MoE-A2.7B"),
        ("decapoda-research/llama-7b-hf", "llama-7b"),
        ("codellama/CodeLlama-34b-Instruct-hf", "CodeLlama-34b"),
        ("01-ai/Yi-34B-Chat", "Yi-34B"),
    ],
)
def test_who_gives_a_model_and_how_it_was_trained_and_kept_make_no_other_shape(given: str, name: str) -> None:
    found = find_model(given)
    assert (found.name, found.config) == (name, find_model_config(name))
    assert found.notes[0] == f"{given.rpartition('/')[2]}: planned as {name}"
    assert found.notes[1:] == find_model(name).notes
    assert found.is_packed == ("4bit" in given)


@pytest.mark.parametrize(
    "given",
    [
        "Llama-3.4-8B", "Llama-3.1-9B", "Llama-3-18B", "Llama-4-8B", "Mistral-7B", "Mistral-7B-v0.4", "gemma-1.1-7b-it",
        "Mistral-Small-Instruct-2409", "Mistral-Small-3.2-24B-Instruct-2506", "Phi-3-mini-128k-instruct", "roberta",
        "t5", "bert-uncased", "Qwen2.5-VL-7B-Instruct", "Qwen2-7B", "Qwen3-Embedding-8B", "Phi-4-mini-flash-reasoning",
        "DeepSeek-V3.2", "DeepSeek-V2-Lite",
        "GLM-4.6", "Hermes-3-Llama-3.1-8B", "a/b/Qwen3-4B", "/models/Qwen3-4B",
        "./Qwen3-4B", "~/Qwen3-4B", "Qwen3-4B/", "-", "/",
    ],
)  # fmt: skip
def test_another_size_or_version_and_a_path_are_never_taken_for_one_that_is_known(given: str) -> None:
    with pytest.raises(RequestError, match="no model is known by this name"):
        find_model(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("unsloth/Qwen3-4B-GGUF", r"weights in GGUF are not trained\. Give the model .* made from: Qwen3-4B\."),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", r"weights in GPTQ are not trained\. .* made from: Qwen2\.5-7B\."),
        ("Qwen/Qwen3-8B-FP8", r"in FP8 .*: Qwen3-8B\."),
        ("someone/unheard-of-AWQ", r"in AWQ are not trained\. Give the model that they were made from\."),
    ],
)
def test_weights_that_cannot_be_trained_are_refused_with_the_model_that_can(given: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        find_model(given)


def test_an_entry_says_what_a_plan_of_it_leaves_out() -> None:
    tower = find_model("google/gemma-3-12b-pt").notes[0]
    assert "without the vision tower" in tower
    assert "give the model's folder to plan both" in tower
    assert "MXFP4" in find_model("gpt-oss-120b").notes[0]
    assert "FP8" in find_model("DeepSeek-R1").notes[0]
    assert find_model("google/gemma-3-1b-pt").notes == ()


def test_what_is_given_out_is_a_copy() -> None:
    find_model_config("qwen3-30b-a3b")["mlp_only_layers"].append(7)
    assert find_model_config("qwen3-30b-a3b")["mlp_only_layers"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen/Qwen2.5-8B-Instruct", r"Did you mean .*Qwen2\.5-"),
        ("someone/gpt2x", "Did you mean gpt2"),
        ("llama-8b", r"Did you mean .*Llama-3\.1-8B"),
        ("Qwen-7B", r"Did you mean Qwen2\.5-7B or Qwen2\.5-Coder-7B"),
        ("zzz", "give the path of its folder or config.json. Known models: distilbert-base-uncased, .*, mlp-deep"),
        ("", "Known models: "),
    ],
)
def test_another_name_is_answered_with_those_near(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        find_model_config(name)


@pytest.mark.parametrize(
    ("size", "parameters"), [("tiny", 826_368), ("char", 10_770_048), ("small", 124_475_904), ("post", 86_728_704)]
)
def test_a_gptlite_has_the_parameters_of_its_size(size: str, parameters: int) -> None:
    """As the class itself has them on the meta device, with 65 characters; `small` has GPT-2's tokens."""
    config = find_model_config(f"gptlite-{size}")
    with torch.device("meta"):
        model = GPTLiteForCausalLM(GPTLiteConfig(**{k: v for k, v in config.items() if k != "architectures"}))
    assert model_of(config).parameters == model.num_parameters() == parameters


@pytest.mark.parametrize(("name", "width", "layers"), [("mlp-wide", 8192, 3), ("mlp-deep", 256, 2048)])
def test_the_mlps_are_those_of_the_benchmark(name: str, width: int, layers: int) -> None:
    assert find_model_config(name) == {"model_type": "mlp", "width": width, "layers": layers}
    head = 2 * width + 2
    assert ENTRIES[name]["parameters"] == layers * (width * width + width) + head


def test_the_page_says_how_many_there_are() -> None:
    assert f"one of {len(model_names())} known names" in (REPO / "docs/plan.md").read_text()


def test_a_name_is_found_without_torch() -> None:
    script = (
        "import sys; from finetune.plan.named import find_model_config; find_model_config('gpt2');"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
