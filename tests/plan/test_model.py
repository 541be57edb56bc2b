"""Every tensor of every family, by name and shape, as transformers builds it on the meta device."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from traced_here import traced_here  # noqa: F401
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import finetune.models.gptlite
import finetune.models.mlp  # noqa: F401 - they register their models
from finetune.errors import RequestError
from finetune.measure.models import as_loaded
from finetune.plan.model import KINDS, model_of, read_config

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {**SMALL, **FEW, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
          "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 28}  # fmt: skip
DISTIL = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "vocab_size": 101}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101, "n_positions": 32}
T5 = {"d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_heads": 4, "vocab_size": 101}
CAUSAL, CLASSES, MASKED = AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForMaskedLM
IMAGES, TOKENS = AutoModelForImageClassification, AutoModelForTokenClassification
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    *((family, head, SMALL) for family in ("bert", "roberta") for head in (CLASSES, MASKED)),
    ("bert", MASKED, {**SMALL, "tie_word_embeddings": False}),
    ("roberta", MASKED, {**SMALL, "tie_word_embeddings": False}),
    ("distilbert", CLASSES, {**DISTIL, "num_labels": 5}),
    ("distilbert", MASKED, DISTIL),
    *((family, TOKENS, {**SMALL, "num_labels": 5}) for family in ("bert", "roberta")),
    ("distilbert", TOKENS, DISTIL),
    ("gpt2", CAUSAL, GPT2),
    ("gpt2", CLASSES, {**GPT2, "n_inner": 80}),
    ("gptlite", CAUSAL, SMALL),
    ("gptlite", CAUSAL, {**SMALL, "intermediate_size": None, "bias": False, "tie_word_embeddings": True}),
    *((family, CAUSAL, GROUPED) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")),
    (
        "llama",
        CAUSAL,
        {**GROUPED, "head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    *((family, CLASSES, GROUPED) for family in ("llama", "qwen2", "mistral", "phi")),
    *((family, TOKENS, GROUPED) for family in ("llama", "qwen3", "mixtral", "phi")),
    ("gpt2", TOKENS, GPT2),
    ("qwen3", CAUSAL, {**GROUPED, "head_dim": 16, "attention_bias": True}),
    ("mixtral", CAUSAL, {**GROUPED, "num_local_experts": 3}),
    (
        "qwen3_moe",
        CAUSAL,
        {**GROUPED, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    ("olmoe", CAUSAL, {**GROUPED, "num_experts": 3, "num_experts_per_tok": 2}),
    ("qwen2_moe", CAUSAL, {**GROUPED, **FEW, "num_experts": 3, "shared_expert_intermediate_size": 56}),
    ("glm4_moe", CAUSAL, {**GROUPED, **FEW, "head_dim": 24, "n_routed_experts": 3, "attention_bias": True}),
    ("glm4_moe", CAUSAL, {**GROUPED, **FEW, "n_routed_experts": 3, "use_qk_norm": True, "attention_bias": True}),
    ("deepseek_v3", CAUSAL, LATENT),
    ("deepseek_v3", TOKENS, {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
    ("deepseek_v3", CAUSAL, {**LATENT, "first_k_dense_replace": 0}),
    ("phi3", CAUSAL, {**GROUPED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    ("phi", CAUSAL, {**GROUPED, "qk_layernorm": True}),
    ("smollm3", CAUSAL, {**GROUPED, "pad_token_id": 0}),
    ("smollm3", CLASSES, {**GROUPED, "pad_token_id": 0, "attention_bias": True, "mlp_bias": True}),
    ("gpt_oss", CAUSAL, {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2}),
    ("gpt_oss", TOKENS, {**GROUPED, "num_local_experts": 5, "head_dim": 16, "attention_bias": False}),
    ("t5", AutoModelForSeq2SeqLM, T5),
    (
        "t5",
        AutoModelForSeq2SeqLM,
        {**T5, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    ("mlp", CLASSES, {"width": 24, "layers": 5, "num_labels": 3}),
    ("mlp", CLASSES, {"width": 24, "layers": 2, "bias": False}),
    ("resnet", IMAGES, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}),
    ("resnet", IMAGES, {"embedding_size": 8, "hidden_sizes": [16, 32, 64], "depths": [2, 1, 2], "num_labels": 7}),
    ("resnet", IMAGES, {"hidden_sizes": [32], "depths": [2], "downsample_in_first_stage": True}),
]


@pytest.mark.parametrize(("family", "auto", "values"), CASES)
def test_every_tensor_is_that_of_the_real_model(family: str, auto: Any, values: dict[str, Any], tmp_path: Path) -> None:
    how = {} if family == "resnet" else {"dtype": torch.bfloat16}  # as models are traced: it is that of one buffer
    with torch.device("meta"):
        real = as_loaded(auto.from_config(CONFIG_MAPPING[family](**values), **how), {"model_type": family, **values})
    real.config.architectures = [type(real).__name__]
    real.config.save_pretrained(tmp_path)
    found = model_of(read_config(tmp_path))
    assert {tensor.name: tensor.shape for tensor in found.tensors} == {
        name: tuple(parameter.shape) for name, parameter in real.named_parameters()
    }
    assert found.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert len(found.tensors) == len(list(real.parameters()))
    assert {buffer.name: (buffer.shape, buffer.bytes_each) for buffer in found.buffers} == {
        name: (tuple(buffer.shape), buffer.element_size()) for name, buffer in real.named_buffers()
    }


def test_a_head_of_its_own_is_planned_as_it_is_loaded(tmp_path: Path) -> None:
    """Of T5 1.1, whose published config says that it is not tied, and which transformers saves as tied."""
    config = CONFIG_MAPPING["t5"](**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    own = AutoModelForSeq2SeqLM.from_config(config)
    own.lm_head.weight = torch.nn.Parameter(torch.randn_like(own.lm_head.weight))
    own.save_pretrained(tmp_path)
    saved = read_config(tmp_path)
    published = {key: one for key, one in saved.items() if key != "scale_decoder_outputs"}
    for one in (saved, {**published, "tie_word_embeddings": False}):
        (tmp_path / "config.json").write_text(json.dumps(one))
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert loaded.lm_head.weight is not loaded.shared.weight
        planned = model_of(read_config(tmp_path))
        assert planned.parameters == sum(parameter.numel() for parameter in loaded.parameters())


def test_every_family_has_a_case() -> None:
    assert {family for family, _, _ in CASES} == set(KINDS)


def test_a_model_without_a_head_is_planned_as_its_family_usually_is() -> None:
    config = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config |= {"intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 16, "type_vocab_size": 2}
    bare = model_of({**config, "architectures": ["BertModel"]}, "config.json")
    usual = model_of(config, "config.json")
    assert (bare.head, bare.tensors) == (usual.head, usual.tensors)


def test_blocks_and_what_is_in_none_make_the_whole() -> None:
    model = model_of({"model_type": "t5", **T5})
    assert model.layers == 6
    layers = Counter[int | None]()
    for tensor in model.tensors:
        layers[tensor.layer] += tensor.elements
    assert set(layers) == {None, *range(6)}
    assert layers[4] > layers[1]  # a decoder's block looks at the encoder, too


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_type"}, "model_type is 'no_such_type', which transformers .* lacks"),
        ({"model_type": "llama", "hidden_size": 64}, "num_(hidden_layers|attention_heads) is missing"),
        ({"model_type": "llama", **GROUPED, "hidden_size": -1}, "hidden_size is -1, but it must be a whole number"),
        ({"model_type": "llama", **GROUPED, "vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"model_type": "llama", **GROUPED, "architectures": ["LlamaForTokens"]}, "must end in one of ForCausalLM"),
        ({"model_type": "llama", **GROUPED, "num_hidden_layers": 10**7}, "10,000,000 layers are more than 3,000"),
        ({"model_type": "resnet", "depths": [3, 4, 10**12, 3]}, "1,000,000,000,010 layers are more than 3,000"),
        (
            {"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "architectures": ["ResNetForCausalLM"]},
            "the known head of resnet is",
        ),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=message):
        model_of(read_config(tmp_path))
    with pytest.raises(RequestError, match="cannot be read"):
        read_config(tmp_path / "none.json")
