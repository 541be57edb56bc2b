"""A stage of a pipeline: some entries of the flat list of layers that a model comes as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from finetune.plan.forward.parts import Part, Setting
from finetune.plan.values import Value

ENDS = {"gptlite": (2, 2), "mlp": (0, 1)}  # entries before a model's blocks and behind them; the loss is in the last


@dataclass(frozen=True)
class Listed:
    """`names` of all entries by their place, what a stage is `given`, and what an entry makes of it."""

    names: list[str]
    given: Value
    run: Callable[[int, Value], Value]


def entries_of(family: str, layers: int) -> Part:
    return Part(0, layers + sum(ENDS[family]))


def stage(setting: Setting, family: str, part: Part, listed: Listed) -> Value:
    """DeepSpeed runs a stage's layers in groups of `activation_checkpoint_interval`, and recomputes those groups in
    which all may be (deepspeed 0.19.8, runtime/pipe/module.py, forward and _is_checkpointable)."""
    before, behind = ENDS[family]
    end, x = len(listed.names) - behind, listed.given
    assert 0 <= part.first < part.last <= len(listed.names), part
    step = setting.checkpoint_interval or 1
    for first in range(part.first, part.last, step):
        group = range(first, min(first + step, part.last))
        again = bool(setting.checkpoint_interval) and group[-1] < end
        layer = first - before if before <= first < end else None
        with setting.tape.segment(listed.names[first], x, layer=layer, recomputed=again):
            for place in group:
                x = listed.run(place, x)
    return x
