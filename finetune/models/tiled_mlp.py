"""MLPs computed on a part of the tokens at a time, so that only a part of their wide activations exists.

It is DeepSpeed's TiledMLP (0.19.8, runtime/sequence_parallel/ulysses_sp.py; Arctic Long Sequence Training, arXiv
2506.13996, section 3.1.1): the forward pass saves its input alone, and the backward pass computes each part again. The
gradient of a weight is the sum over the parts, so it differs from the untiled one by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from finetune.errors import RequestError
from finetune.models.probes import small_copy, tried

PROBE_TOKENS = 6
NAME = "mlp"  # of a block's MLP in Llama, Qwen, Gemma, Mistral, Phi, GPT-2 and their descendants


def choose_tiled_mlp(asked: int, model: Any) -> None:
    """Raises RequestError if the MLPs of `model` cannot be computed in `asked` parts; 0 asks for nothing."""
    if asked and (reason := tried(model, refusal)):
        raise RequestError(f"--tiled_mlp_num_shards {asked}: {reason}. Drop it.")


def refusal(model: Any) -> str | None:
    """Why the MLPs of `model` cannot be tiled; None if they can. A small copy is tried, a token at a time."""
    name, found = type(model).__name__, list(_mlps(model))
    parts = [part for one in found for part in one.modules()]
    if not found:
        return f"no module of {name} is called {NAME}"
    if any(isinstance(part, nn.ModuleList) or getattr(part, "num_experts", 0) for part in parts):
        return f"{name} is a mixture of experts, in which a part of the tokens may not reach every expert"
    if any(isinstance(part, nn.Dropout) and part.p for part in parts):
        return f"the MLPs of {name} have dropout, which the backward pass would draw again"
    twin, ids = small_copy(model, PROBE_TOKENS), torch.arange(PROBE_TOKENS)[None]
    with torch.no_grad():
        plain = twin(input_ids=ids).logits
        for module in _mlps(twin):
            module.forward = _by_token(module.forward)
        tiled = twin(input_ids=ids).logits
    return None if torch.allclose(tiled, plain, atol=1e-4) else f"an MLP of {name} mixes tokens"


def _by_token(plain: Any) -> Any:
    return lambda x: torch.cat([plain(one) for one in x.split(1, dim=1)], dim=1)


def _mlps(model: Any) -> Iterator[Any]:
    return (module for name, module in model.named_modules() if name.rpartition(".")[2] == NAME)


def use_tiled_mlp(model: Any, shards: int) -> None:
    """Compute each MLP of `model` in so many `shards` of its tokens. Call `choose_tiled_mlp` first, and this after peft
    has wrapped the layers. DeepSpeed must train the model: it waits for the last shard of a gradient."""
    for module in _mlps(model):
        module.forward = _tiled(module, module.forward, shards)


def _tiled(module: nn.Module, plain: Any, shards: int) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def forward(x: torch.Tensor) -> Any:  # (B, T, C)
        # If nothing before it trains, as below the first adapter, no gradient would arrive: TiledMLP sees only x.
        if torch.is_grad_enabled() and not x.requires_grad:
            return plain(x)
        # torch.chunk may make fewer chunks than it is asked for. TiledMLP would then wait for the last in vain, so that
        # gradients are never reduced, and ranks with other numbers of tokens would gather weights more often.
        length, weights = x.shape[1], list(module.parameters())
        if missing := -length % shards:
            x = nn.functional.pad(x, (0, 0, 0, missing))
        # The backward pass is outside of torch.autocast, but computes each part again: as the forward pass did.
        kind = x.device.type
        precision = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

        def of_part(_: Any, part: torch.Tensor) -> Any:
            with precision:
                return plain(part)

        return TiledMLP.apply(of_part, module, x, shards, weights)[:, :length]

    return forward
