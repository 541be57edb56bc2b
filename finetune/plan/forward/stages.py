"""A stage of a pipeline, from the trace of the whole model. The flat list of layers has an entry for each layer of the
model, and before and behind these for each module with weights (finetune/models/gptlite_pipeline.py, mlp.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from finetune.plan.forward.attention import document_mask
from finetune.plan.forward.cuts import cuts_of
from finetune.plan.forward.losses import chunked_loss, cross_entropy
from finetune.plan.forward.parts import Setting
from finetune.plan.forward.player import Player
from finetune.plan.forward.traced import let_go, play
from finetune.plan.model import Trace
from finetune.plan.values import FP32_BYTES, Value

PIPELINED = ("gptlite", "mlp")  # families that are trained as pipelines

Ops = Sequence[tuple[int, Any]]  # with their places in the trace


@dataclass(frozen=True)
class Entry:
    """Of the flat list. `given`: the hidden states that it reads, the first one's ids; `masks`: what else it reads of
    other entries in the whole model, and makes for itself here."""

    name: str
    layer: int | None
    ops: Ops
    given: int
    masks: tuple[int, ...]


@lru_cache(maxsize=8)
def entries_of(trace: Trace) -> list[Entry]:
    """The last entry contains the loss."""
    found, wanted = list[Entry](), trace.result
    made = {number for op in trace.ops for number in op["out"]}
    for part in reversed(cuts_of(trace)):
        weighed = [at for at, (_, op) in enumerate(part.ops) if op["weights"]]
        ends = [at + 1 for at in weighed[:-1]] if part.layer is None else []
        for first, last in reversed([*pairwise([0, *ends, len(part.ops)])]):
            ops: Ops = part.ops[first:last]
            name = part.name
            if part.layer is None:
                ops = _leading_to(wanted, ops)
                name = next(op["weights"][-1] for _, op in ops if op["weights"]).split(".")[-2]
            own = {number for _, op in ops for number in op["out"]}
            read = list(dict.fromkeys(number for _, op in ops for number in op["in"] if number not in own))
            wanted = next((number for number in read if trace.values[number][3]), read[0])
            masks = tuple(number for number in read if number != wanted and number in made)
            found.insert(0, Entry(name, part.layer, ops, wanted, masks))
    return found


def _leading_to(wanted: int, ops: Ops) -> Ops:
    """Without those of the layers' masks."""
    needed, found = {wanted}, list[tuple[int, Any]]()
    for at, op in reversed(ops):
        if not needed.isdisjoint(op["out"]):
            needed.update(op["in"])
            found.insert(0, (at, op))
    return found


def stage(trace: Trace, setting: Setting, part: range) -> Value:
    """`part`: its entries in the flat list. DeepSpeed runs a stage's layers in groups of
    `activation_checkpoint_interval`, and recomputes the groups whose layers all support it: those of the model, and
    what comes before (deepspeed 0.19.8, runtime/pipe/module.py, forward and _is_checkpointable)."""
    tape, entries, player = setting.tape, entries_of(trace), Player(trace, setting)
    assert 0 <= part.start < part.stop <= len(entries), part
    if part.start:
        given = entries[part.start].given
        player.put(given, tape.given(player.elements(given), needs_grad=True))
    loss, step = None, setting.checkpoint_interval or 1
    behind = 1 + max(at for at, entry in enumerate(entries) if entry.layer is not None)
    for first in range(part.start, part.stop, step):
        group = entries[first : min(first + step, part.stop)]
        again = bool(setting.checkpoint_interval) and first + len(group) <= behind
        x = player.value(group[0].given)
        with tape.segment(group[0].name, x, recomputed=again):
            for entry in group:
                loss = _play(player, entry)
    return loss or player.values[entries[part.stop].given]


def _play(player: Player, entry: Entry) -> Value | None:
    """Returns the loss, if it is in this entry."""
    setting, tape = player.setting, player.tape
    player.masks = document_mask(setting) if entry.layer is not None else ()
    for number in entry.masks:
        player.put(number, tape.op("mask", (), player.elements(number), needs_grad=False))
    for at, op in entry.ops:
        if at == player.seen.head:
            return _loss(player, op)
        play(player, op)
        let_go(player, at)
    tape.hold(*player.masks, *(player.values[number] for number in entry.masks))
    return None


def _loss(player: Player, head: Any) -> Value:
    """Of logits in fp32 (summed_loss of gptlite_pipeline.py and of pipeline.py)."""
    setting, tape = player.setting, player.tape
    if setting.loss_chunk_tokens:
        return chunked_loss(setting, player.values[head["in"][0]], head["weights"][-1])
    play(player, head)
    logits = player.values[head["out"][0]]
    loss = cross_entropy(tape, tape.cast(logits, FP32_BYTES), setting.batch.positions)
    tape.hold(logits)
    return loss
