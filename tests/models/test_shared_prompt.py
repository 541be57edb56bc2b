"""Answers that share their prompt's forward pass are judged, and learnt, as each is by itself."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from finetune.data.preference_batches import OF_PAIRS, collate, collate_shared, shared_tokens
from finetune.data.preference_rows import fitted
from finetune.errors import RequestError
from finetune.models.chunked_loss import use_chunked_loss
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.probes import check_shared_prompt
from finetune.training.preference import PreferenceTrainer

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
LLAMA = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 1, "initializer_range": 0.3}
CAN: list[tuple[Any, Any]] = [
    (GPTLiteForCausalLM, GPTLiteConfig(**SHAPE, initializer_range=0.3, dropout=0.0, max_position_embeddings=16)),
    (
        GPT2LMHeadModel,
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16, initializer_range=0.3,
                   attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    ),
    (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    (MistralForCausalLM, MistralConfig(**LLAMA, sliding_window=16)),
    (Qwen2ForCausalLM, Qwen2Config(**LLAMA, sliding_window=4)),
    (Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=16)),
    (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE, intermediate_size=64, initializer_range=0.3)),
    (OPTForCausalLM, OPTConfig(**SHAPE, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, init_std=0.3)),
]  # fmt: skip
CANNOT: list[tuple[Any, Any, str]] = [
    (MistralForCausalLM, MistralConfig(**LLAMA, sliding_window=8), "or give --block_size 8 at most"),
    (Gemma3ForCausalLM, Gemma3TextConfig(**LLAMA, head_dim=16, sliding_window=8), "--block_size 8 at most"),
    (BloomForCausalLM, BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=50), "share_prompt"),
    (MambaForCausalLM, MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=50, state_size=4), "share_prompt"),
]


def ids_of(value: Any) -> str:
    return getattr(value, "model_type", "")


def pair(prompt: int, chosen: int, rejected: int, alike: int, row: int, draw: torch.Generator) -> dict[str, Any]:
    """Token ids of a prompt and two answers, of which the first `alike` tokens are the same."""
    start, one, other = (torch.randint(50, (n,), generator=draw).tolist() for n in (prompt, chosen, rejected))
    other[:alike] = one[:alike]
    found = {"row": row, "label": 1, "margin": 0.0}
    for side, answer in zip(OF_PAIRS, (one, other), strict=True):
        found |= {f"{side}_ids": start + answer, f"{side}_learnt": [False] * prompt + [True] * len(answer)}
    return found


def rows() -> list[dict[str, Any]]:
    """Uneven ones: without a prompt to share, with answers that begin alike, with a prompt of one token."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(9, 5, 3, 0), (2, 6, 7, 3), (1, 2, 4, 0), (12, 1, 4, 0), (3, 4, 4, 2)]
    return [pair(*shape, row=i, draw=draw) for i, shape in enumerate(shapes)]


def judged(model: Any, batch: dict[str, torch.Tensor], chunk: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Of all answers log-probabilities and tokens, and the gradients of a loss that weighs each otherwise."""
    model = copy.deepcopy(model).train()
    if chunk:
        use_chunked_loss(model, chunk, by_token=True)
    asking = SimpleNamespace(by_token=bool(chunk))
    logps, tokens = PreferenceTrainer.log_probabilities(asking, model, batch)  # type: ignore[arg-type]
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return logps.detach(), tokens, {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize(("kind", "config"), CAN, ids=ids_of)
def test_log_probabilities_and_gradients_are_those_of_separate_rows(kind: Any, config: Any, chunk: int) -> None:
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config))
    check_shared_prompt(model, 16)
    shared, apart = collate_shared(0, rows()), collate(OF_PAIRS, 0, rows())
    assert shared["input_ids"].numel() < apart["input_ids"].numel()
    assert torch.equal(shared["places"], apart["places"])
    one, other = (judged(model, batch, chunk) for batch in (shared, apart))
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(one[1], other[1])
    for name, gradient in other[2].items():
        torch.testing.assert_close(one[2][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("answers", [(1, 9), (9, 1)])
def test_a_side_that_was_cut_before_what_is_learnt_of_it_counts_as_it_does_by_itself(answers: tuple[int, int]) -> None:
    start = [3, 4, 5, 6]
    sides = [(start + [*range(10, 10 + n), 7, 8], [False] * (4 + n) + [True] * 2) for n in answers]
    cut, was_cut = fitted(sides, 8)
    assert was_cut
    assert sorted(True in learnt for _, learnt in cut) == [False, True]
    row: dict[str, Any] = {"row": 0, "label": 1, "margin": 0.0}
    for side, (ids, learnt) in zip(OF_PAIRS, cut, strict=True):
        row |= {f"{side}_ids": ids, f"{side}_learnt": learnt}
    torch.manual_seed(0)
    kind, config = CAN[0]
    model = kind(copy.deepcopy(config))
    one, other = (judged(model, batch, 0) for batch in (collate_shared(0, [row]), collate(OF_PAIRS, 0, [row])))
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-5)
    assert sorted(one[1].tolist()) == sorted(other[1].tolist()) == [1, 2]  # counts are divided by
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(("kind", "config", "said"), CANNOT, ids=ids_of)
def test_a_model_that_cannot_share_a_prompt_is_refused(kind: Any, config: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        check_shared_prompt(kind(copy.deepcopy(config)), 16)


def test_an_attention_that_takes_no_such_mask_is_refused() -> None:
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="eager"))
    with pytest.raises(RequestError, match=r"eager attention .* Give --attn_implementation sdpa"):
        check_shared_prompt(model, 16)


def test_each_side_has_the_last_token_before_an_answer_and_what_is_learnt() -> None:
    assert [shared_tokens(row) for row in rows()] == [8, 1, 0, 11, 2]
    batch = collate_shared(0, rows()[1:2])
    (first, second) = (rows()[1][f"{side}_ids"] for side in OF_PAIRS)
    assert batch["input_ids"][0].tolist() == [first[0], *first[1:], *second[1:]]
    assert batch["position_ids"][0].tolist() == [0, *range(1, 8), *range(1, 9)]
    assert batch["segments"][0].tolist() == [0, *[1] * 7, *[2] * 8]
    assert batch["targets"][0].tolist() == [-100, *first[2:], -100, *second[2:], -100]
