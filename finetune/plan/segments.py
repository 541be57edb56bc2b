"""Seconds of a tape's segments: each block, and what comes before and after the blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from finetune.plan.kernels import NOTHING, Kernels, Work, kernels_of
from finetune.plan.machine import Machine
from finetune.plan.model import Model
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES, Segment


@dataclass(frozen=True)
class SegmentWork:
    """The work of one segment in a micro-batch; `again`: recomputation."""

    forward: Work
    backward: Work
    again: Work
    flops: float  # of products, forward and backward
    weights: frozenset[str]


@lru_cache(maxsize=64)
def passed(tape: Tape, model: Model, machine: Machine, precision: str) -> tuple[SegmentWork, ...]:
    """Each segment's work in a micro-batch, on a machine."""
    kernels = kernels_of(machine, precision)
    elements = {tensor.name: tensor.elements for tensor in model.tensors}
    found: list[SegmentWork] = []
    for segment in tape.segments:
        if segment.like is None:
            found.append(_segment_work(segment, kernels, elements))
        else:  # the same operators under other names
            found.append(replace(found[segment.like], weights=_weights(segment)))
    return tuple(found)


def _weights(segment: Segment) -> frozenset[str]:
    return frozenset(name for op in segment.ops for name in op.weights)


def _segment_work(segment: Segment, kernels: Kernels, elements: dict[str, int]) -> SegmentWork:
    forward, backward, flops = Work(), Work(), 0.0
    for op in segment.ops:
        ahead, back = kernels.op(op)
        forward, backward = forward + ahead, backward + back
        flops += sum(gemm.flops for gemm in (*op.gemms, *op.gemms_back))
        if op.name == "embedding" and op.kernels_back:  # the gradient is as large as the whole table
            size = sum(elements.get(name, 0) for name in op.weights) * FP32_BYTES
            backward += Work(kernels.moved("zero", size), 1)
    return SegmentWork(forward, backward, forward if segment.recomputed else NOTHING, flops, _weights(segment))
