"""Attention for bf16 on a CPU: by two products and a softmax, except for long samples without dropout.

torch 2.13's fused kernel for CPUs is slower on short samples in bf16, where the products use the matrix units. With
dropout SDPA is not fused at all, and no faster at any length. In fp32 it is used (docs/results/limit.md)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from finetune.models.dropout import dropped
from finetune.run.facts import SHORT_TOKENS

NAME = "sdpa_if_long"
OF_SDPA_ALONE = ("cache", "softcap")  # arguments


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Equals transformers' `sdpa_attention_forward` up to rounding. `query`: (batch, heads, queries, width); `key` and
    `value`: (batch, key heads, keys, width); `attention_mask`: boolean or to be added, (batch, 1 or heads, queries,
    keys); `position_bias`: of T5, to be added. Returns (batch, queries, heads, width)."""
    queries, keys = query.shape[2], key.shape[2]
    has_more = any(more.get(name) is not None for name in OF_SDPA_ALONE)
    if has_more or (keys > SHORT_TOKENS and not dropout):
        given: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, **more,
        )  # fmt: skip
        return given
    key, value = (repeat_kv(one, query.shape[1] // one.shape[1]) for one in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and is_causal and queries > 1:
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = dropped(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
