"""A model that mixes the documents of a block is found out; one that keeps them apart is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from finetune.data.packing import Collator, PackedDataset, Tokens, best_fit_decreasing, one_each
from finetune.errors import RequestError
from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.models.probes import check_document_mask, mixed_documents

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 100}
LLAMA = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 2}
APART: list[tuple[Any, Any]] = [
    (GPTLiteForCausalLM, GPTLiteConfig(**SHAPE)),
    (GPT2LMHeadModel, GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=100)),
    (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    (Gemma2ForCausalLM, Gemma2Config(**LLAMA, sliding_window=8)),
]
MIXED: list[tuple[Any, Any]] = [
    (OPTForCausalLM, OPTConfig(**SHAPE, ffn_dim=64, word_embed_proj_dim=32)),
    (BloomForCausalLM, BloomConfig(hidden_size=32, n_layer=3, n_head=2, vocab_size=100)),
]


@pytest.mark.parametrize(("kind", "config"), APART, ids=lambda value: getattr(value, "model_type", ""))
def test_documents_are_apart_where_the_model_builds_its_mask_from_positions(kind: Any, config: Any) -> None:
    model = kind(config)
    before = torch.random.get_rng_state()
    assert mixed_documents(model) is None
    assert torch.equal(torch.random.get_rng_state(), before), "asking draws no random number"


@pytest.mark.parametrize(("kind", "config"), MIXED, ids=lambda value: getattr(value, "model_type", ""))
def test_a_model_that_mixes_them_is_refused(kind: Any, config: Any) -> None:
    with pytest.raises(RequestError, match="lets the documents of a block attend to each other"):
        check_document_mask(kind(config), 4)


def test_masked_documents_in_a_block_have_the_loss_that_they_have_alone() -> None:
    torch.manual_seed(0)
    model = GPTLiteForCausalLM(GPTLiteConfig(**SHAPE, max_position_embeddings=32))
    lengths = [5, 30, 11, 2, 17, 9]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = Tokens(np.random.default_rng(0).integers(0, 100, starts[-1]).astype(np.uint16), starts, None)
    total = []
    for cut, mask in ((one_each, False), (best_fit_decreasing, True), (best_fit_decreasing, False)):
        blocks = PackedDataset(tokens, cut(starts, 32), mask)
        batch = Collator(0)([blocks[i] for i in range(len(blocks))])
        total.append(model(**batch, num_items_in_batch=torch.tensor(1)).loss.item())
    alone, masked, unmasked = total
    assert masked == pytest.approx(alone, rel=1e-5)
    assert unmasked != pytest.approx(alone, rel=1e-5)


def test_a_model_that_cannot_be_asked_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100, state_size=4))
    with pytest.raises(RequestError, match=r"could not be checked .* Drop it"):
        check_document_mask(model, 4)


def test_flash_attention_parts_documents_in_batches_of_one_row_alone() -> None:
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    check_document_mask(model, 1)
    with pytest.raises(RequestError, match=r"only with one row per micro-batch, not 4\. Set --per_device"):
        check_document_mask(model, 4)
