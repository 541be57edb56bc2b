"""Attention without SDPA for short samples in bf16 on a CPU: the same results, and used where it is the faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from finetune.models.short_attention import NAME, attend
from finetune.run.choose import recipes
from finetune.run.facts import SHORT_TOKENS, mixes_attention
from finetune.run.launch import Launch
from finetune.run.resolve import resolve


@pytest.mark.parametrize("mask", ["none", "boolean", "added"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_outputs_and_gradients_are_those_of_sdpa_up_to_rounding(
    is_causal: bool, key_heads: int, has_bias: bool, mask: str
) -> None:
    torch.manual_seed(0)
    layer = SimpleNamespace(is_causal=is_causal, num_key_value_groups=4 // key_heads)
    seen: Any = None
    if mask != "none":
        seen = torch.rand(2, 1, SHORT_TOKENS, SHORT_TOKENS) > 0.3
        seen[..., 0] = True
    if mask == "added":
        seen = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
    given = [torch.randn(2, heads, SHORT_TOKENS, 32, dtype=torch.bfloat16) for heads in (4, key_heads, key_heads)]
    bias = torch.randn(1, 4, SHORT_TOKENS, SHORT_TOKENS, dtype=torch.bfloat16) if has_bias else None
    results = []
    for function in (attend, sdpa_attention_forward):
        inputs = [one.clone().requires_grad_() for one in given]
        out, _ = function(layer, *inputs, seen, position_bias=bias)
        (out.float() ** 2).sum().backward()
        results.append([out, *(one.grad for one in inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert torch.linalg.vector_norm((ours - theirs).float()) < 0.02 * torch.linalg.vector_norm(theirs.float())


def test_long_samples_are_left_to_sdpa() -> None:
    layer = SimpleNamespace(is_causal=True)
    given = [torch.randn(1, 4, SHORT_TOKENS + 1, 16, dtype=torch.bfloat16) for _ in range(3)]
    assert torch.equal(attend(layer, *given, None)[0], sdpa_attention_forward(layer, *given, None)[0])


def test_weights_are_dropped_at_the_rate_and_scaled() -> None:
    layer = SimpleNamespace(is_causal=False)
    query, key = (torch.randn(4, 4, 300, 16) for _ in range(2))
    out, _ = attend(layer, query, key, torch.ones(4, 4, 300, 16), None, dropout=0.5)
    assert out.mean().item() == pytest.approx(1, abs=0.02)
    assert out.std().item() > 0.05


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("model", [BertModel(BertConfig(**SMALL)), LlamaForCausalLM(LlamaConfig(**SMALL))])
def test_padded_rows_of_real_models_read_what_they_read_under_sdpa(model: Any) -> None:
    model.eval()
    ids, mask = torch.randint(50, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    mask[1, 7:] = 0
    found = []
    for attention in ("sdpa", NAME):
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model(input_ids=ids, attention_mask=mask)[0].float()[mask.bool()])
    assert torch.allclose(*found, atol=0.05)
    assert not torch.equal(*found), "the attention is not used"


@pytest.mark.parametrize(
    ("words", "device", "precision", "expected"),
    [
        ("", "cpu", "bf16", True),
        ("", "cpu", "fp32", False),
        ("", "cuda", "bf16", False),
        ("--attn_implementation sdpa", "cpu", "bf16", False),
        ("--sequence_parallel_size 2", "cpu", "bf16", False),
    ],
)
def test_it_is_for_bf16_on_a_cpu_where_no_other_is_asked_for(
    words: str, device: str, precision: str, expected: bool
) -> None:
    launch = Launch(world_size=2, local_world_size=2, launcher="torchrun")
    run = resolve(recipes()["causal_lm"], words.split(), launch, is_here=False)
    assert mixes_attention(run, device, precision) is expected
