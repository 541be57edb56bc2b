"""The tape of a model from what `finetune.measure.tracing` recorded of its modules: operators with their sizes,
what autograd saves of each, and when the last variable lets go of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from finetune.plan.families.parts import VECTORS
from finetune.plan.forward.attention import document_mask
from finetune.plan.forward.cuts import WRITE, Cut, cuts_of, repeated
from finetune.plan.forward.expert_parallel import end_of_mixture, expert_parallel, mixture_of
from finetune.plan.forward.losses import chunked_loss, output_in_fp32, vector_loss
from finetune.plan.forward.operators import CAST, PLAIN, TURNS, WEIGHED, any_other, converted, copies_back
from finetune.plan.forward.parts import RNG_STATE_BYTES, Setting, renamed
from finetune.plan.forward.trace_values import TraceValues
from finetune.plan.model import Trace
from finetune.plan.values import FP32_BYTES, Value


def tape_of_trace(trace: Trace, setting: Setting) -> Value:
    """Records the whole trace on the setting's tape, the middle of many like layers once; returns the result."""
    player, tape, parts = Player(trace, setting), setting.tape, cuts_of(trace)
    alike, segments = repeated(parts, setting), dict[int | None, int]()  # by layer
    for part in parts:
        if old := alike.get(part.layer):
            at = segments[old.layer]
            tape.segments.append(renamed(tape.segments[at], at, old.name, part.name, part.layer or 0))
            player.repeat(old, part)
            continue
        segments[part.layer] = len(tape.segments)
        again = part.layer is not None and setting.recomputes(part.layer)
        entry = (*player.entry(part), *player.masks) if part.layer is not None else ()
        state = (tape.given(RNG_STATE_BYTES, 1),) if again and tape.numbers.device == "cpu" else ()
        with tape.segment(part.name, *entry, *state, layer=part.layer, recomputed=again):
            player.masks = document_mask(setting) if part is parts[0] else player.masks
            skips_to = 0
            for place, (at, op) in enumerate(part.ops):
                if at == player.seen.head and setting.loss_chunk_tokens:
                    return chunked_loss(setting, player.values[op["in"][0]], op["weights"][-1])
                if player.is_expert_parallel(op):
                    skips_to = place + player.play_expert_parallel([one for _, one in part.ops[place:]])
                tape.times = player.times(op)
                if place >= skips_to:
                    player.play(op)
                player.let_go(at)
    for number in trace.kept:
        output_in_fp32(tape, player.values[number])
    tape.release_casts()
    if setting.head == VECTORS:
        with tape.segment("head"):
            return vector_loss(setting, player.values[trace.result])
    return player.values[trace.result]


class Player(TraceValues):
    """Plays the operators of a trace on its tape."""

    def let_go(self, at: int) -> None:
        """Variables held these storages up to now."""
        if dying := [self.storages[place] for place in self.seen.dying.get(at, ()) if place in self.storages]:
            self.tape.hold(*(Value(0, 1, storage, False) for storage in dying))

    def entry(self, part: Cut) -> tuple[Value, ...]:
        """What a layer reads of earlier ones, its hidden states first."""
        made = {number for _, op in part.ops for number in op["out"]}
        given = dict.fromkeys(number for _, op in part.ops for number in op["in"] if number not in made)
        return tuple(sorted(map(self.value, given), key=lambda value: not value.needs_grad))

    def repeat(self, old: Cut, new: Cut) -> None:
        """What later layers read of a layer that is not played is what its like has made."""
        value, place = (to - since for to, since in zip(new.first, old.first, strict=True))
        for _, op in old.ops:
            for number in self.values.keys() & op["out"]:
                self.values[number + value] = self.values[number]
                old_place = self.trace.values[number][2]
                if old_place >= old.first[1]:  # not of a view of what was there before
                    self.storages[old_place + place] = self.values[number].storage

    def play(self, op: Any) -> None:
        op, is_weight = self.reads_weights(op)
        inputs, first = [self.value(number) for number in op["in"]], op["out"][0]
        base = self.seen.written.get(first) if op["name"] == WRITE else None
        if base is not None:
            self.put(base, self.tape.write(self.value(base), inputs[1]))
        elif is_weight:
            self.in_fp32 |= dict.fromkeys(op["out"], op["weights"][0])
        elif len(op["out"]) > 1 and op["part"]:
            for number, part in zip(op["out"], self.tape.chunk(inputs[0], *map(self.elements, op["out"])), strict=True):
                self.put(number, part)
        else:
            self.play_one(op, inputs)

    def reads_weights(self, op: Any) -> tuple[Any, bool]:
        """The operator with the weights whose conversions it reads, and whether what it makes is a weight still."""
        names = [self.in_fp32[number] for number in op["in"] if number in self.in_fp32]
        if names:
            op = {**op, "in": [one for one in op["in"] if one not in self.in_fp32], "weights": names}
        widens = op["name"] == CAST and self.trace.values[op["out"][0]][1] == FP32_BYTES
        is_same = widens and bool(op["weights"]) and self.tape.bytes_of(op["weights"][0]) == FP32_BYTES
        return op, is_same or bool(names and not op["in"] and (op["part"] or op["name"] in TURNS))

    def play_one(self, op: Any, inputs: list[Value]) -> None:
        """An operator that makes a value of its own."""
        name, first = op["name"], op["out"][0]
        is_idle = self.seen.idle.issuperset(op["out"])
        if is_idle or name.startswith("new_") or name.endswith("_like"):  # only sizes are read
            weights = [] if op["inside"] and inputs else op["weights"]  # without gradients
            op = {**op, "weights": weights if inputs else []}  # or converted for nothing
            inputs = [replace(one, needs_grad=False) for one in inputs]
        whole = max((self.whole.get(number, 0) for number in op["in"]), default=0)
        out = None
        if op["weights"] and inputs:
            out = WEIGHED[name](self, op, inputs) if name in WEIGHED and not op["inside"] else None
        elif name in TURNS:
            out = self.tape.alias(inputs[0]) if first in self.seen.sliced or copies_back(self, op) else inputs[0]
        elif op["part"]:
            out = self.tape.alias(inputs[0], self.elements(first), name)
        elif name == CAST and inputs:
            out, whole = converted(self, first, inputs[0], whole)
        elif name in PLAIN and inputs and not (op["inside"] and self.trace.values[first][3]):
            out = PLAIN[name](self, op, inputs)  # what runs within an operator of its own saves nothing by itself
        is_known = out is not None
        out = out or any_other(self, op, inputs)
        if is_known or is_idle:
            self.save_beside(op)
        self.put(first, out)
        if whole:
            self.whole[first] = whole

    def is_expert_parallel(self, op: Any) -> bool:
        """Whether it is the router of experts that ranks hold together."""
        return bool(op["weights"]) and f"{mixture_of(op)}.experts.w1" in self.tape.shapes

    def play_expert_parallel(self, ops: Sequence[Any]) -> int:
        """Plays a mixture in expert parallelism in place of the first of `ops`; returns of how many."""
        x = ops[0]["in"][0]
        count, made = end_of_mixture(ops, x, lambda number: self.trace.values[number][2])
        self.put(made, expert_parallel(self.setting, mixture_of(ops[0]), self.values[x]))
        return count

    def save_beside(self, op: Any) -> None:
        """What an operator of the model's own has saved is recorded with the one that follows it."""
        own = {self.trace.values[number][2] for number in (*op["in"], *op["out"])}
        if beside := [self.storages[one] for one in op["saved"] if one in self.storages and one not in own]:
            self.tape.op("save", (), 1, saves=[Value(0, 1, one) for one in beside], kernels=0, needs_grad=True)
