"""A trace cut into layers and what lies between them, which layers are alike, and what its values are used for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from finetune.plan.forward.parts import Setting, pattern
from finetune.plan.model import Trace
from finetune.plan.values import ATTENTION

LINEAR, SOFTMAX = ("mm", "addmm"), "_softmax"
WRITE = "copy_"  # into another tensor, or a part of one
LAYER = re.compile(r".*?\.\d+(?=\.)")  # the name of the layer that a parameter belongs to


class Uses:
    """What a trace's values are used for: in slices, by a softmax, by which attention; of which whole a part that is
    written to is; what each iteration of a loop makes and holds beyond it; which storages die at each operator; the
    head's place; and the values that no gradient reaches, such as scores of which only the best places are read: what
    autograd saves for them is freed as soon as they are."""

    def __init__(self, trace: Trace) -> None:
        self.dying = defaultdict[int, list[int]](list)
        for place, at in enumerate(trace.last):
            self.dying[at].append(place)
        users = [(op["name"], op, number) for op in trace.ops for number in op["in"]]
        self.sliced = {number for name, _, number in users if name == "slice"}
        self.in_softmax = {number for name, _, number in users if name == SOFTMAX}
        self.attentions = {number: op for name, op, number in users if name == ATTENTION}
        self.head = max((at for at, op in enumerate(trace.ops) if op["name"] in LINEAR and op["weights"]), default=-1)
        ends = trace.backwards(trace.result, *trace.kept)
        self.idle = {number for op, is_reached in ends if not is_reached for number in op["out"]}
        wholes = dict[int, int]()
        for op in trace.ops:
            wholes |= {part: wholes.get(op["in"][0], op["in"][0]) for part in op["out"] if op["part"] and op["in"]}
        written = {op["out"][0] for op in trace.ops if op["name"] == WRITE}
        self.written = {part: whole for part, whole in wholes.items() if part in written}
        self.held = {number for op in trace.ops for number in op.get("held", ())}


uses_of = lru_cache(maxsize=8)(Uses)


@dataclass(frozen=True)
class Cut:
    """The operators of a segment. `first`: the first value and storage that it makes, not those of views of earlier
    ones."""

    ops: tuple[tuple[int, Any], ...]
    layer: int | None
    name: str
    first: tuple[int, int]
    key: Hashable  # alike for layers that differ in their names alone


@lru_cache(maxsize=8)
def cuts_of(trace: Trace) -> list[Cut]:
    """In order."""
    found, before, last = list[Cut](), (0, 0), -1
    for segment, group in groupby(enumerate(trace.ops), key=lambda one: one[1]["segment"]):
        ops, layer = tuple(group), segment // 2 if segment % 2 else None
        made = [number for _, op in ops for number in op["out"]]
        places = [trace.values[number][2] for number in made]
        first = min(made), min((place for place in places if place > last), default=last + 1)
        last = max(last, *places)
        names = [LAYER.match(weight) for _, op in ops for weight in op["weights"]]
        name = "head" if found else "embeddings"
        if layer is not None:
            name = next((one[0] for one in names if one), f"layer {layer}")
        key = _key(trace, [op for _, op in ops], name, first, before) if layer is not None else segment
        found.append(Cut(ops, layer, name, first, key))
        before = first
    return found


def repeated(parts: list[Cut], setting: Setting) -> dict[int | None, Cut]:
    """Layers that need not be played, each with one that it repeats."""
    found = dict[int | None, Cut]()
    for is_layer, group in groupby(parts, key=lambda part: part.layer is not None):
        layers = list(group) if is_layer else []
        first, period, repeats = pattern([(part.key, setting.recomputes(part.layer or 0)) for part in layers])
        for place in range(first + period, first + repeats * period):
            found[layers[place].layer] = layers[first + (place - first) % period]
    return found


def _key(trace: Trace, ops: list[Any], name: str, first: tuple[int, int], before: tuple[int, int]) -> Hashable:
    """What an operator reads of this layer or the one before it is numbered from there."""

    def near(number: int, side: int) -> tuple[bool, int]:
        return (True, number - first[side]) if number >= before[side] else (False, number)

    def seen(op: Any) -> Hashable:
        both = (*op["in"], *op["out"])
        values = [(near(one, 0), near(trace.values[one][2], 1), trace.values[one][0]) for one in both]
        saved = [near(place, 1) for place in op["saved"]]
        return op["name"], [weight.replace(name, "", 1) for weight in op["weights"]], values, saved

    return repr([seen(op) for op in ops])
