"""Which models DeepSpeed's AutoEP can train in expert parallelism, and the names of their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from finetune.errors import RequestError
from finetune.models.expert_layers import joined_experts, layer_names, whole_names
from finetune.models.expert_parallel import check_expert_parallel
from finetune.training.expert_parallel import section_for

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
SPLIT = {**SHAPE, "num_experts": 4, "moe_intermediate_size": 12}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
HEADS = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def check(config: Any, size: int = 2) -> None:
    check_expert_parallel(AutoModelForCausalLM.from_config(config), size, section_for(config, size))


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**SPLIT, norm_topk_prob=True),
        Qwen3MoeConfig(**SPLIT, norm_topk_prob=False),
        MixtralConfig(**SHAPE, num_local_experts=4),
        OlmoeConfig(**SHAPE, num_experts=4),
    ],
    ids=["Qwen3", "Qwen3 without norm", "Mixtral", "OLMoE"],
)
def test_a_mixture_whose_layers_compute_the_same_is_accepted(config: Any) -> None:
    model, before = AutoModelForCausalLM.from_config(config), torch.get_rng_state()
    check_expert_parallel(model, 2, section_for(config, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DeepseekV3Config(**SHAPE, moe_intermediate_size=12, **DEEPSEEK, **HEADS), "Deepseek"),
        (GptOssConfig(**SHAPE, num_local_experts=4, head_dim=8), "GptOss"),
        (Qwen2MoeConfig(**SPLIT, shared_expert_intermediate_size=12), "Qwen2"),
        (LlamaConfig(**{name: size for name, size in SHAPE.items() if "experts" not in name}), "no experts"),
        (MixtralConfig(**SHAPE, num_local_experts=5), "does not divide the model's 5 experts"),
        (MixtralConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.1), "adds noise"),
    ],
    ids=["DeepSeek-V3", "gpt-oss", "Qwen2", "no experts", "five experts", "noise"],
)
def test_any_other_model_is_refused(config: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"--expert_parallel_size 2.*{said}"):
        check(config)


def test_experts_have_their_names_back() -> None:
    place = "model.layers.0.mlp"
    weights = {f"{place}.experts.{name}": torch.full((2, 3, 4), float(name[1])) for name in ("w1", "w3")}
    weights |= {f"{place}.experts.w2": torch.ones(2, 4, 3), f"{place}.router.gate.weight": torch.ones(2, 4)}
    weights["model.norm.weight"] = torch.ones(4)
    found = joined_experts(weights)
    assert {name: tuple(one.shape) for name, one in found.items()} == {
        f"{place}.experts.gate_up_proj": (2, 6, 4),
        f"{place}.experts.down_proj": (2, 4, 3),
        f"{place}.gate.weight": (2, 4),
        "model.norm.weight": (4,),
    }
    assert found[f"{place}.experts.gate_up_proj"][1, :, 0].tolist() == [1.0] * 3 + [3.0] * 3
    for name, parts in whole_names(list(weights)).items():
        assert layer_names(name, found) == parts
