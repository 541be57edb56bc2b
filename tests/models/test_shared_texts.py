"""A model is asked whether ranks can share a text in it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune.errors import RequestError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.probes import check_sequence_parallel, refusal, small_copy

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SHAPE, "intermediate_size": 64}
GROUPED = {**WIDE, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}


def model_of(kind: str, **values: Any) -> Any:
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**values)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Llama", WIDE),
        ("Qwen3", GROUPED),
        ("Mistral", GROUPED),
        ("GPT2", SHAPE),
        ("GPTNeoX", WIDE),
        ("Gemma3", GROUPED),
    ],
)
def test_models_that_see_others_by_causal_attention_alone_are_taken(kind: str, values: dict[str, Any]) -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert refusal(model_of(kind, **values)) is None
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Mixtral", {"num_local_experts": 2}),
        ("Qwen3Moe", {"num_experts": 2, "moe_intermediate_size": 512}),
        ("DeepseekV3", {**EXPERTS, "moe_intermediate_size": 512, "first_k_dense_replace": 0}),
    ],
)
def test_a_copy_to_try_has_narrow_experts(kind: str, values: dict[str, Any]) -> None:
    """Those of Qwen3-235B at full width would take 10 GB on the host."""
    twin = small_copy(model_of(kind, **{**SHAPE, "intermediate_size": 512, **values}), 8)
    sizes = [weight.numel() for name, weight in twin.named_parameters() if ".experts." in name]
    assert sizes
    assert max(sizes) < 2 * 512 * SHAPE["hidden_size"]


def test_a_gpt_lite_is_taken() -> None:
    assert refusal(GPTLiteForCausalLM(GPTLiteConfig())) is None


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("Falcon", SHAPE, "does not use transformers' AttentionInterface"),
        ("DeepseekV3", {**WIDE, **EXPERTS}, "differ in size"),
        ("GptOss", {**GROUPED, "num_local_experts": 4}, "weights per head"),
    ],
)
def test_others_are_refused(kind: str, values: dict[str, Any], said: str) -> None:
    assert said in str(refusal(model_of(kind, **values)))


def test_a_layer_that_mixes_tokens_elsewhere_is_found() -> None:
    """As a convolution or a recurrence does."""
    model = model_of("Llama", **WIDE)

    class Mixing(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.norm.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))

    model.__class__ = Mixing
    assert "mixes tokens outside attention" in str(refusal(model))


def test_a_model_whose_attention_is_not_exchanged_is_refused_and_an_odd_block_too() -> None:
    model = model_of("Llama", **WIDE)
    with pytest.raises(RequestError, match="does not divide --block_size, which is 31"):
        check_sequence_parallel(model, 2, 31)
    model.set_attn_implementation("eager")
    with pytest.raises(RequestError, match="uses eager attention; sequence parallelism supports sdpa"):
        check_sequence_parallel(model, 2, 32)
