"""MLPs computed on a part of the tokens at a time (--tiled_mlp_num_shards): a tape whose MLPs are one operator each.

Follows DeepSpeed's TiledMLP (0.19.8, runtime/sequence_parallel/ulysses_sp.py), as finetune/models/tiled_mlp.py calls
it: the forward pass saves its input alone, and joins the outputs of the parts; the backward pass computes each part
again, and adds its gradients to those of the parts before.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from finetune.plan.step import Engine, Ledger, Pass
from finetune.plan.tape import Tape
from finetune.plan.values import TILED_MLP, Op, Segment, Storage, Value

PART = ".mlp."  # of the names of an MLP's modules
PASSED = Op("inside a tile", (), (), kernels=0, kernels_back=0)  # in the place of an operator within


def tiled(tape: Tape, shards: int) -> Tape:
    """The tape with MLPs in so many `shards`; the same tape for 0."""
    if not shards:
        return tape
    made = copy(tape)
    made.segments = []
    for segment in tape.segments:
        like = made.segments[segment.like] if segment.like is not None else None
        made.segments.append(_tiled(tape, segment, shards, like))
    return made


def _tiled(tape: Tape, segment: Segment, shards: int, like: Segment | None) -> Segment:
    """Operators keep their places, since tensors live until the place of their last use."""
    inside = [place for place, op in enumerate(segment.ops) if any(PART in f".{name}" for name in op.weights)]
    if not inside:
        return segment
    first, last = inside[0], inside[-1]
    while len(_leaving(segment.ops, first, last)) > 1:  # an adapter's sum comes after its last weight
        last += 1
    ops = segment.ops[first : last + 1]
    weights = tuple(dict.fromkeys(name for op in ops for name in op.weights))
    module = weights[0][: weights[0].index(PART) + len(PART) - 1]
    one = _one(tape, ops, shards) if like is None else like.ops[last]
    ours = [PASSED] * (last - first) + [replace(one, weights=weights, module=module)]
    return replace(segment, ops=[*segment.ops[:first], *ours, *segment.ops[last + 1 :]])


def _leaving(ops: list[Op], first: int, last: int) -> set[Value]:
    """What operators `first` to `last` make for later ones."""
    made = {value for op in ops[first : last + 1] for value in op.outputs}
    return made & {value for op in ops[last + 1 :] for value in op.inputs}


def _one(tape: Tape, ops: list[Op], shards: int) -> Op:
    """All of an MLP as one operator."""
    made = {value for op in ops for value in op.outputs}
    (given,) = {value for op in ops if op.name != "hold" for value in op.inputs} - made
    out, nothing = ops[-1].outputs[0], Value(0, 1, Storage(0), False)
    tile, alone, both = _tile(tape, ops, given, shards), Ledger(), Ledger()
    Pass(tile, alone, Engine()).evaluate()
    passed = Pass(tile, both, Engine())
    passed.forward()
    passed.backward()
    return Op(
        TILED_MLP, (given,), (out, nothing), saved=(given.storage, nothing.storage),  # the last is made as it ends
        scratch=max(out.bytes, alone.peak.bytes),
        scratch_back=both.peak.bytes + out.bytes // shards,  # a variable holds a part's output on its way back
        gemms=tuple(gemm for op in ops for gemm in op.gemms), gemms_back=tuple(g for op in ops for g in op.gemms_back),
        gemms_again=tuple(gemm for op in ops for gemm in op.gemms),
        moved=sum(op.moved for op in ops), moved_back=sum(op.moved + op.moved_back for op in ops),
        kernels=shards * sum(op.kernels for op in ops),
        kernels_back=shards * sum(op.kernels + op.kernels_back for op in ops),
    )  # fmt: skip


def _tile(tape: Tape, ops: list[Op], given: Value, shards: int) -> Tape:
    """The tape of one part. Its input is a view, and so is the gradient of its output: they take nothing."""
    tile = Tape(tape.numbers, tape.shapes, tape.lora, tape.packed)
    values, storages = dict[Value, Value](), {given.storage: Storage(0)}

    def part(value: Value) -> Value:
        if value not in values:
            storage = storages.setdefault(value.storage, Storage(value.storage.bytes // shards))
            values[value] = Value(value.elements // shards, value.bytes_each, storage, value.needs_grad)
        return values[value]

    with tile.segment("tile", part(given)):
        for op in ops:
            inputs, outputs = (tuple(part(one) for one in some) for some in (op.inputs, op.outputs))
            saved = tuple(storages[one] for one in op.saved)
            tile._add(replace(op, inputs=inputs, outputs=outputs, saved=saved, scratch=op.scratch // shards,
                              scratch_back=op.scratch_back // shards))  # fmt: skip
    tile.result = part(ops[-1].outputs[0])
    tile.result.elements = 0
    return tile
