"""Seconds of operators on a machine by the roofline model (Williams, Waterman and Patterson, CACM 2009): the longer of
the products' time, at the rate of their operands' precision, and the time of the bytes that are moved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from finetune.plan.forward.operators import CONVOLUTION
from finetune.plan.machine import Machine
from finetune.plan.tape import Tape
from finetune.plan.values import ATTENTION, CHUNKED_LOSS, FLASH_ATTENTION_2, FP32_BYTES, Gemm, Op, Segment

# The least time of a GPU kernel: to fill the chip and to drain it.
KERNEL_SECONDS = 2e-6
# Share of a chip's best isolated product rate that products reach within a training step, where power and clocks are
# shared and shapes vary. Fitted, not measured: it makes the median error of the rows of 2,048 tokens on eight A100-80GB
# in docs/results/plan_public.md zero; no other row was used. A machine may have its own.
SUSTAINED = 0.845
# Keys per query at which fused attention reaches half of the rate of products: FlashAttention-2 forward on an H100, 191
# of 335 TFLOP/s at 512 tokens with a causal mask, 309 of 370 without (Shah et al., arXiv 2407.08608, figure 5).
HALF_SPEED_KEYS = 150
# The host's time on a GPU, in launches of a forward pass. SIMPLE: of an operator that no module surrounds, as in a
# backward pass: 11e-6 s for `a * 1.2`, and 37e-6 for each launch of a layer, on one host (machines/V100-16GB.json,
# launch_seconds). PYTHON: of hooks that were measured in launches of a CPU, which calls no driver; fitted to the rows
# of the first Qwen under ZeRO-3 up to 1,024 tokens in docs/results/plan_public.md.
SIMPLE, PYTHON = 0.3, 0.56


@dataclass(frozen=True)
class Work:
    """Seconds of a device, and the number of kernels that the host launches for it. `host`: seconds for which it waits
    for the host, as for an optimizer there with its disk."""

    device: float = 0.0
    launches: float = 0.0
    host: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.device + other.device, self.launches + other.launches, self.host + other.host)

    def times(self, count: float) -> Work:
        return Work(self.device * count, self.launches * count, self.host * count)


NOTHING = Work()


class Kernels:
    """`precision` is that of products, as far as the machine has it, and as far as their operands are in it. `tf32`:
    what --tf32 says of products in fp32; None: nothing, and torch then rounds convolutions alone, with cuDNN
    (torch.backends.cudnn.allow_tf32)."""

    def __init__(self, machine: Machine, precision: str, tf32: bool | None = None) -> None:
        self.machine = machine
        has_tf32 = "tf32" in machine.peak_flops
        self.fp32 = "tf32" if has_tf32 and tf32 else "fp32"
        by_default = has_tf32 and tf32 is None and machine.device == "cuda"
        self.fp32_convolution = "tf32" if by_default else self.fp32
        self.precision = precision if precision in machine.peak_flops and precision != "fp32" else self.fp32
        self.bandwidth = machine.memory_bandwidth * machine.memory_efficiency
        is_cpu = machine.device == "cpu"
        on_gpu = KERNEL_SECONDS, machine.sustained or SUSTAINED, HALF_SPEED_KEYS
        self.floor, self.sustained, self.half_speed_keys = (0.0, 1.0, 0) if is_cpu else on_gpu
        self.simple, self.python = (1.0, 1.0) if is_cpu else (SIMPLE, PYTHON)

    def op(self, op: Op) -> tuple[Work, Work]:
        """An operator's work, forward and backward."""
        forward = self._work(op, op.gemms, op.moved, op.kernels)
        given = sum(value.needs_grad for value in op.inputs)
        if not op.gemms and (op.passes_on or op.narrows):
            # No kernel, unless two gradients meet: then the second is added to the first.
            return forward, self.moved(op.moved) if given > 1 and op.passes_on else NOTHING
        if not given and not op.weights:
            return forward, NOTHING
        return forward, self._work(op, (*op.gemms_back, *op.gemms_again), op.moved_back, op.kernels_back, "backward")

    def _work(self, op: Op, gemms: tuple[Gemm, ...], moved: float, kernels: int, way: str = "forward") -> Work:
        if not kernels:
            return NOTHING
        passes = self.moved(moved, kernels)
        if not gemms:
            return passes
        products = sum(gemm.flops for gemm in gemms) / self._rate(op, gemms[0], way)
        if op.name == CHUNKED_LOSS:  # passes over its logits besides
            return passes + Work(products)
        ahead = self.moved(op.moved_ahead) if op.moved_ahead else NOTHING
        return ahead + Work(max(products + kernels * self.floor, passes.device), kernels)

    def _rate(self, op: Op, gemm: Gemm, way: str) -> float:
        """FLOP/s of an operator's products. In half precision, those whose inputs are fp32 still run in fp32."""
        is_half = self.precision in ("bf16", "fp16") and op.inputs[0].bytes_each < FP32_BYTES
        fp32 = self.fp32_convolution if op.name == CONVOLUTION else self.fp32
        precision = self.precision if is_half else fp32
        share = self.machine.gemm_efficiency[precision] * self.sustained
        if op.name == FLASH_ATTENTION_2:
            share = min(share, self.machine.flash_attention_2.get(way, share))
        if op.name in (ATTENTION, FLASH_ATTENTION_2):
            share /= 1 + self.half_speed_keys / gemm.n
        return share * self.machine.peak_flops[precision]

    def moved(self, size: float, kernels: float = 1.0) -> Work:
        """Of operators that move `size` bytes with so many kernels."""
        return Work(size / self.bandwidth + kernels * self.floor, kernels)


kernels_of = lru_cache(maxsize=64)(Kernels)

# Segments: each block, and what comes before and after the blocks


@dataclass(frozen=True)
class SegmentWork:
    """The work of one segment in a micro-batch; `again`: recomputation."""

    forward: Work
    backward: Work
    again: Work
    flops: float  # of products, forward and backward


@lru_cache(maxsize=64)
def passed(tape: Tape, machine: Machine, precision: str, tf32: bool | None = None) -> tuple[SegmentWork, ...]:
    """Each segment's work in a micro-batch, on a machine."""
    kernels = kernels_of(machine, precision, tf32)
    found: list[SegmentWork] = []
    for segment in tape.segments:  # one that is like another has the same operators under other names
        found.append(_segment_work(segment, kernels) if segment.like is None else found[segment.like])
    return tuple(found)


def _segment_work(segment: Segment, kernels: Kernels) -> SegmentWork:
    works = [(kernels.op(op), op.times) for op in segment.ops]
    forward, backward = (sum((pair[way].times(many) for pair, many in works), NOTHING) for way in (0, 1))
    backward = replace(backward, launches=kernels.simple * backward.launches)
    flops = sum(gemm.flops * op.times for op in segment.ops for gemm in (*op.gemms, *op.gemms_back))
    return SegmentWork(forward, backward, forward if segment.recomputed else NOTHING, flops)
