"""Shapes that cannot be are refused by name: wherever the real model cannot be built or run, and nowhere else."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from transformers.activations import ACT2FN

import finetune.models.gptlite  # noqa: F401 - it registers its model
from finetune.errors import RequestError
from finetune.plan.families.parts import CAUSAL, CLASSES, IMAGES, SEQ2SEQ, Sizes
from finetune.plan.families.possible import KNOWN_ACTIVATIONS, SHARED, refuse_impossible
from finetune.plan.forward.parts import Batch
from finetune.plan.job import build_tape
from finetune.plan.model import model_of
from finetune.plan.values import Numbers

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
         "vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
ENCODER = {**SMALL, "max_position_embeddings": 32}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
          "first_k_dense_replace": 1}  # fmt: skip
ROTARY = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "phi",
    "mixtral",
    "qwen3_moe",
    "smollm3",
    "gpt_oss",
    "glm4_moe",
    "olmoe",
    "qwen2_moe",
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": (CLASSES, ENCODER),
    "roberta": (CLASSES, ENCODER),
    "distilbert": (CLASSES, {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "vocab_size": 101,
                             "max_position_embeddings": 32}),
    "gpt2": (CAUSAL, {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 32}),
    "gptlite": (CAUSAL, {**SMALL, "max_position_embeddings": 32}),
    **dict.fromkeys(ROTARY, (CAUSAL, GROUPED)),
    "mixtral": (CAUSAL, {**GROUPED, "num_local_experts": 4}),
    "gpt_oss": (CAUSAL, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (CAUSAL, {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}),
    "glm4_moe": (CAUSAL, {**GROUPED, **ROUTED, "head_dim": 12, "n_group": 1, "topk_group": 1}),
    "olmoe": (CAUSAL, {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (CAUSAL, {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                           "shared_expert_intermediate_size": 40}),
    "deepseek_v3": (CAUSAL, {**SMALL, **ROUTED, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
                             "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                             "v_head_dim": 12}),
    "t5": (SEQ2SEQ, {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 101,
                     "decoder_start_token_id": 0, "pad_token_id": 0}),
    "resnet": (IMAGES, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
}  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "olmoe", "qwen2_moe", "deepseek_v3")
AUTO = {CAUSAL: AutoModelForCausalLM, CLASSES: AutoModelForSequenceClassification, SEQ2SEQ: AutoModelForSeq2SeqLM,
        IMAGES: AutoModelForImageClassification}  # fmt: skip
HEADS = {"distilbert": "n_heads", "gpt2": "n_head", "t5": "num_heads"}
ACTS = {"distilbert": "activation", "gpt2": "activation_function", "gemma2": "hidden_activation",
        "gemma3_text": "hidden_activation", "t5": "feed_forward_proj"}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4}
OF_DECODERS: list[dict[str, Any]] = [
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 8},
    {"num_key_value_heads": 1},
    {"head_dim": 7},
    {"head_dim": 20},
    {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16},
    {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}},
    {"rope_parameters": LINEAR},
    {"rope_parameters": {**LINEAR, "factor": 2.0}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 2.0},
    {"attention_dropout": 1.5},
    {"layer_types": ["full_attention"]},
    {"layer_types": ["full_attention", "nonsense"]},
    {"layer_types": ["full_attention", "full_attention"]},
    {"pad_token_id": 500},
    {"pad_token_id": -1},
    {"num_hidden_layers": -1},
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in MODELS),
    *((kind, {HEADS.get(kind, "num_attention_heads"): 5}) for kind in MODELS if kind != "resnet"),
    *((kind, {"vocab_size": size}) for kind in MODELS if kind != "resnet" for size in (0, -3)),
    *((kind, {ACTS.get(kind, "hidden_act"): act}) for kind in MODELS for act in ("nonsense", "tanh")),
    *((kind, change) for kind in (*ROTARY, "deepseek_v3") for change in OF_DECODERS),
    *(("deepseek_v3", change) for change in (
        {"n_group": 1}, {"n_group": 3}, {"n_group": 4}, {"topk_group": 2}, {"topk_group": 3}, {"qk_rope_head_dim": 5},
        {"q_lora_rank": None}, {"first_k_dense_replace": 0}, {"first_k_dense_replace": 9},
        {"n_group": 1, "topk_group": 2}, {"num_key_value_heads": None})),
    *((kind, {"num_experts_per_tok": count}) for kind in MIXTURES for count in (4, 16)),
    *(("gptlite", {"num_experts": 4, "num_experts_per_tok": count}) for count in (1, 4, 5)),
    *((kind, {"pad_token_id": 500}) for kind in ("bert", "roberta", "distilbert", "gpt2", "t5")),
    *((kind, {name: 1.5}) for kind, name in (("bert", "hidden_dropout_prob"), ("gpt2", "resid_pdrop"),
                                             ("t5", "dropout_rate"), ("gptlite", "dropout"))),
    *(("t5", {"feed_forward_proj": word}) for word in ("gated-gelu", "gated-gelu-x", "odd-gelu", "gated-nonsense")),
    *(("resnet", change) for change in ({"depths": [1]}, {"layer_type": "nonsense"},
                                        {"layer_type": "bottleneck", "hidden_sizes": [2, 4]})),
]  # fmt: skip


def why_the_real_one_fails(kind: str, change: dict[str, Any]) -> Exception | None:
    head, config = MODELS[kind]
    try:
        settled = CONFIG_MAPPING[kind](**deepcopy({**config, **change}))  # it fills in what it is given
        model = AUTO[head].from_config(settled).train()
        if head == IMAGES:
            model(pixel_values=torch.randn(2, 3, 32, 32))
        else:
            ids = torch.randint(3, 100, (2, 8))
            model(input_ids=ids, labels=torch.zeros(2, dtype=torch.long) if head == CLASSES else ids)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_real_model_fails_on_is_refused_by_name_and_nothing_else_is(kind: str) -> None:
    cases = [change for name, change in CASES if name == kind]
    assert {} in cases
    wrong = []
    for change in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            real = why_the_real_one_fails(kind, change)
        said = None
        head, config = MODELS[kind]
        try:
            given = {"model_type": kind, **config, **change}
            if kind == "resnet":
                build_tape(model_of(given, head=head), Batch(2, 8, 32), Numbers())
            refuse_impossible(kind, Sizes(given, kind))
        except RequestError as error:
            said = str(error)
        names = [*change, "head_dim", "rope_parameters", "num_attention_heads"] if change else []
        if bool(real) != bool(said) or (said and not any(name in said for name in names)):
            wrong.append((change, real, said))
    assert not wrong


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"hidden_size": 4096, "num_attention_heads": 30, "num_key_value_heads": 30},
         "hidden_size 4,096 is not a multiple of num_attention_heads 30"),
        ("mistral", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 7},
         "num_attention_heads 32 is not a multiple of num_key_value_heads 7"),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 16}, "num_experts_per_tok is 16, but there are 8"),
        ("qwen3", {"head_dim": 7}, "a head is 7 wide"),
        ("deepseek_v3", {"topk_group": None}, ": topk_group is missing. Add it"),
    ],
)  # fmt: skip
def test_a_fault_is_said_with_its_numbers(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        model_of({"model_type": kind, **MODELS[kind][1], **change})


def test_activations_are_those_of_transformers() -> None:
    assert set(KNOWN_ACTIVATIONS) == set(ACT2FN)
    assert set(SHARED) < set(MODELS)
