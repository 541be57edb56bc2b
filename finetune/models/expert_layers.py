"""The names of experts' weights in AutoEP's layers and in transformers' models.

AutoEP (deepspeed 0.19.8, module_inject/auto_ep_layer.py) keeps an expert's three matrices in `experts.w1`, `w2` and
`w3`, each (experts of a rank, out, in), and the router in `router.gate`. transformers 5 joins the first and the last in
`experts.gate_up_proj` (experts, 2 x out, in), calls the second `experts.down_proj`, and the router `gate`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch

EXPERT_WEIGHT = re.compile(r"\.experts\.w[123]$")
GATE, UP, DOWN, ROUTER = ".experts.w1", ".experts.w3", ".experts.w2", ".router.gate.weight"
JOINED = {".experts.gate_up_proj": (GATE, UP), ".experts.down_proj": (DOWN,), ".gate.weight": (ROUTER,)}


def whole_names(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each weight of the model, the weights of the engine that make it up, in the order of `names` (the
    engine's)."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        for end, parts in JOINED.items():
            if name.endswith(parts[0]):
                place = name.removesuffix(parts[0])
                found[place + end] = tuple(place + part for part in parts)
        if not name.endswith((GATE, UP, DOWN, ROUTER)):
            found[name] = (name,)
    return found


def joined_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` by the engine's names, with all experts, by the model's."""
    return {
        name: torch.cat([weights[part] for part in parts], dim=1) if len(parts) > 1 else weights[parts[0]]
        for name, parts in whole_names(list(weights)).items()
    }


def layer_names(name: str, names: Collection[str]) -> tuple[str, ...]:
    """The reverse, for one of the model's `names`."""
    for end, parts in JOINED.items():
        place = name.removesuffix(end)
        if place != name and place + ".experts.gate_up_proj" in names:
            return tuple(place + part for part in parts)
    return (name,)
