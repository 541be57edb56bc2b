"""A mixture in expert parallelism (--expert_parallel_size): what one rank holds.

Follows DeepSpeed's AutoEP (0.19.8, module_inject/auto_ep_layer.py, AutoEPMoELayer; moe/ep_experts.py, GroupedExperts):
a layer's `gate_up_proj` becomes `w1` and `w3`, `down_proj` becomes `w2`, and the router's `gate` is `router.gate`.
`finetune.plan.forward.expert_parallel` has its operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from finetune.plan.model import Buffer, Model, Tensor
from finetune.plan.values import FP32_BYTES

PLANNED = ("mixtral", "qwen3_moe", "olmoe")
BOTH, BELOW, GATE = ".experts.gate_up_proj", ".experts.down_proj", ".mlp.gate.weight"
ROUTER = ".router.gate.weight"


@lru_cache(maxsize=16)
def held_by_rank(model: Model, size: int) -> Model:
    """The model as one of `size` ranks holds it that hold each layer's experts together."""
    tensors = tuple(part for tensor in model.tensors for part in _parts(tensor, size))
    counts = tuple(
        Buffer(f"{tensor.name.removesuffix(BOTH)}.tokens_per_expert", tensor.shape[:1], FP32_BYTES)
        for tensor in model.tensors
        if tensor.name.endswith(BOTH)
    )
    return replace(model, tensors=tensors, buffers=(*model.buffers, *counts))


def _parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    if tensor.name.endswith(GATE):
        yield replace(tensor, name=tensor.name.replace(".gate.weight", ROUTER))
    elif tensor.name.endswith(BOTH):
        many, inner, hidden = tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2]
        place = tensor.name.removesuffix("gate_up_proj")
        for name, sides in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            yield replace(tensor, name=place + name, shape=(many // size, *sides), holders=size)
    elif not tensor.name.endswith(BELOW):
        yield tensor
