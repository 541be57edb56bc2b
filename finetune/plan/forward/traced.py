"""The tape of a model from what `finetune.measure.tracing` recorded of its modules: operators with their sizes,
what autograd saves of each, and when the last variable lets go of a tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finetune.plan.families.parts import VECTORS
from finetune.plan.forward.attention import document_mask
from finetune.plan.forward.cuts import WRITE, Cut, cuts_of, repeated
from finetune.plan.forward.expert_parallel import is_expert_parallel, play_expert_parallel
from finetune.plan.forward.losses import chunked_loss, output_in_fp32, vector_loss
from finetune.plan.forward.operators import CAST, PLAIN, TURNS, WEIGHED, any_other, converted, copies_back
from finetune.plan.forward.parts import RNG_STATE_BYTES, Setting, renamed
from finetune.plan.forward.player import Player
from finetune.plan.model import Trace
from finetune.plan.values import FP32_BYTES, Value


def tape_of_trace(trace: Trace, setting: Setting) -> Value:
    """Records the whole trace on the setting's tape, the middle of many like layers once; returns the result."""
    player, tape, parts = Player(trace, setting), setting.tape, cuts_of(trace)
    alike, segments = repeated(parts, setting), dict[int | None, int]()  # by layer
    for part in parts:
        if old := alike.get(part.layer):
            at = segments[old.layer]
            tape.segments.append(renamed(tape.segments[at], at, old.name, part.name))
            _repeat(player, old, part)
            continue
        segments[part.layer] = len(tape.segments)
        again = part.layer is not None and setting.recomputes(part.layer)
        entry = (*_entry(player, part), *player.masks) if part.layer is not None else ()
        state = (tape.given(RNG_STATE_BYTES, 1),) if again and tape.numbers.device == "cpu" else ()
        with tape.segment(part.name, *entry, *state, recomputed=again):
            player.masks = document_mask(setting) if part is parts[0] else player.masks
            skips_to = 0
            for place, (at, op) in enumerate(part.ops):
                if at == player.seen.head and setting.loss_chunk_tokens:
                    return chunked_loss(setting, player.values[op["in"][0]], op["weights"][-1])
                if is_expert_parallel(player, op):
                    skips_to = place + play_expert_parallel(player, [one for _, one in part.ops[place:]])
                tape.times = player.times(op)
                if place >= skips_to:
                    play(player, op)
                let_go(player, at)
    for number in trace.kept:
        output_in_fp32(tape, player.values[number])
    tape.release_casts()
    if setting.head == VECTORS:
        with tape.segment("head"):
            return vector_loss(setting, player.values[trace.result])
    return player.values[trace.result]


def let_go(player: Player, at: int) -> None:
    """Variables held these storages up to now."""
    if dying := [player.storages[place] for place in player.seen.dying.get(at, ()) if place in player.storages]:
        player.tape.hold(*(Value(0, 1, storage, False) for storage in dying))


def _entry(player: Player, part: Cut) -> tuple[Value, ...]:
    """What a layer reads of earlier ones, its hidden states first."""
    made = {number for _, op in part.ops for number in op["out"]}
    given = dict.fromkeys(number for _, op in part.ops for number in op["in"] if number not in made)
    return tuple(sorted(map(player.value, given), key=lambda value: not value.needs_grad))


def _repeat(player: Player, old: Cut, new: Cut) -> None:
    """What later layers read of a layer that is not played is what its like has made."""
    value, place = (to - since for to, since in zip(new.first, old.first, strict=True))
    for _, op in old.ops:
        for number in player.values.keys() & op["out"]:
            player.values[number + value] = player.values[number]
            old_place = player.trace.values[number][2]
            if old_place >= old.first[1]:  # not of a view of what was there before
                player.storages[old_place + place] = player.values[number].storage


def play(player: Player, op: Any) -> None:
    op, is_weight = _reads_weights(player, op)
    inputs, first = [player.value(number) for number in op["in"]], op["out"][0]
    base = player.seen.written.get(first) if op["name"] == WRITE else None
    if base is not None:
        player.put(base, player.tape.write(player.value(base), inputs[1]))
    elif is_weight:
        player.in_fp32 |= dict.fromkeys(op["out"], op["weights"][0])
    elif len(op["out"]) > 1 and op["part"]:
        for number, part in zip(op["out"], player.tape.chunk(inputs[0], *map(player.elements, op["out"])), strict=True):
            player.put(number, part)
    else:
        _play_one(player, op, inputs)


def _reads_weights(player: Player, op: Any) -> tuple[Any, bool]:
    """The operator with the weights whose conversions it reads, and whether what it makes is a weight still."""
    names = [player.in_fp32[number] for number in op["in"] if number in player.in_fp32]
    if names:
        op = {**op, "in": [one for one in op["in"] if one not in player.in_fp32], "weights": names}
    widens = op["name"] == CAST and player.trace.values[op["out"][0]][1] == FP32_BYTES
    is_same = widens and bool(op["weights"]) and player.tape.bytes_of(op["weights"][0]) == FP32_BYTES
    return op, is_same or bool(names and not op["in"] and (op["part"] or op["name"] in TURNS))


def _play_one(player: Player, op: Any, inputs: list[Value]) -> None:
    """An operator that makes a value of its own."""
    name, first = op["name"], op["out"][0]
    is_idle = player.seen.idle.issuperset(op["out"])
    if is_idle or name.startswith("new_") or name.endswith("_like"):  # only sizes are read
        weights = [] if op["inside"] and inputs else op["weights"]  # without gradients
        op = {**op, "weights": weights if inputs else []}  # or converted for nothing
        inputs = [replace(one, needs_grad=False) for one in inputs]
    whole = max((player.whole.get(number, 0) for number in op["in"]), default=0)
    out = None
    if op["weights"] and inputs:
        out = WEIGHED[name](player, op, inputs) if name in WEIGHED and not op["inside"] else None
    elif name in TURNS:
        out = player.tape.alias(inputs[0]) if first in player.seen.sliced or copies_back(player, op) else inputs[0]
    elif op["part"]:
        out = player.tape.alias(inputs[0], player.elements(first), name)
    elif name == CAST and inputs:
        out, whole = converted(player, first, inputs[0], whole)
    elif name in PLAIN and inputs and not (op["inside"] and player.trace.values[first][3]):
        out = PLAIN[name](player, op, inputs)  # what runs within an operator of its own saves nothing by itself
    is_known = out is not None
    out = out or any_other(player, op, inputs)
    if is_known or is_idle:
        _save_beside(player, op)
    player.put(first, out)
    if whole:
        player.whole[first] = whole


def _save_beside(player: Player, op: Any) -> None:
    """What an operator of the model's own has saved is recorded with the one that follows it."""
    own = {player.trace.values[number][2] for number in (*op["in"], *op["out"])}
    if beside := [player.storages[one] for one in op["saved"] if one in player.storages and one not in own]:
        player.tape.op("save", (), 1, saves=[Value(0, 1, one) for one in beside], kernels=0, needs_grad=True)
