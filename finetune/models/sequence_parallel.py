"""Can ranks split a text in this model? The model is tested, since one that mixes tokens elsewhere does not fail."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune.errors import RequestError, first_line
from finetune.models.small_copy import small_copy
from finetune.run.flags.sequence_parallel import ATTENTIONS, check_heads

PROBE_TOKENS = 6
BY_HEAD = ("s_aux", "position_bias")  # arguments to attention that cover all heads (gpt-oss, T5)


def check_sequence_parallel(model: Any, size: int, block_size: int) -> None:
    """Raises RequestError if `size` ranks, each with a part of a text of `block_size` tokens, would not compute what
    one rank computes with all of it."""
    said, name, config = f"--sequence_parallel_size {size}", type(model).__name__, model.config
    check_heads(config.to_dict().get, size, block_size)
    if block_size % size:
        raise RequestError(f"{said} does not divide --block_size, which is {block_size} here. Change one of them.")
    if (kind := config._attn_implementation) not in ATTENTIONS:
        raise RequestError(
            f"{said}: {name} uses {kind} attention; sequence parallelism supports {', '.join(ATTENTIONS)}. Change "
            "--attn_implementation, or drop it."
        )
    try:
        reason = refusal(model)
    except Exception as error:  # a shortened config can raise anything
        reason = f"could not check whether {name} mixes tokens outside attention ({first_line(error)})"
    if reason:
        raise RequestError(f"{said}: {reason}. Drop it.")


def refusal(model: Any) -> str | None:
    """Why `model` does not support sequence parallelism; None if it does. Tests three things on a small copy: that all
    attention goes through the replaced function, that it is plain causal, and that nothing else mixes tokens."""
    name, twin = type(model).__name__, small_copy(model, PROBE_TOKENS)
    twin.config._attn_implementation = "sdpa"
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen: list[tuple[int, int, int]] = []
    by_head: set[str] = set()

    def causal(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        by_head.update(name for name in BY_HEAD if kwargs.get(name) is not None)
        return sdpa(module, query, key, value, None, *args, **kwargs)

    def silent(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return query.new_zeros(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None

    ids = torch.arange(PROBE_TOKENS)[None]
    others = torch.cat([ids[:, -1:], ids[:, 1:]], dim=1)  # another first token
    plain = _logits(twin, ids)
    try:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = causal
        is_causal = torch.allclose(_logits(twin, ids), plain, atol=1e-4)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = silent
        is_apart = torch.allclose(_logits(twin, ids)[:, 1:], _logits(twin, others)[:, 1:], atol=1e-4)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    if not seen:
        return f"{name} does not use transformers' AttentionInterface"
    if by_head:
        return f"{name} has attention weights per head ({by_head.pop()}), which sequence parallelism does not support"
    if len(set(seen)) > 1 or len(set(seen[0])) > 1:
        return f"the heads of {name} differ in size"
    if not is_apart:
        return f"{name} mixes tokens outside attention"
    return None if is_causal else f"{name}'s attention is not plain causal attention"


def _logits(twin: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = twin(input_ids=ids, position_ids=torch.arange(PROBE_TOKENS)[None]).logits
    return logits
