"""Seconds of operators on a machine: matrix products by shape, all others by the bytes that they move.

A calibrated machine has rates by kind and size, interpolated in logarithms. Any other machine uses the roofline model
(Williams, Waterman and Patterson, CACM 2009): the longer of arithmetic time and memory time.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from functools import cache, lru_cache

from finetune.plan.machine import Machine
from finetune.plan.values import ATTENTION, CHUNKED_LOSS, FLASH_ATTENTION_2, FP32_BYTES, Gemm, Op

# The least time of a GPU kernel: to fill the chip and to drain it.
KERNEL_SECONDS = 2e-6
TILE = 64  # rows and columns of a product's tile on a GPU; the rest of a partial tile is wasted (NVIDIA, "Matrix
# Multiplication Background User's Guide", tile quantization; 64 is cuBLAS's smallest)
# Share of a chip's best isolated product rate that products reach within a training step, where power and clocks are
# shared and shapes vary. Fitted, not measured: it makes the median error of the rows of 2,048 tokens on eight A100-80GB
# in docs/results/plan_public.md zero; no other row was used.
SUSTAINED = 0.86
# Fused attention on long sequences, relative to the best product: FlashAttention-2 reaches 73% forward and 63% backward
# of an A100's peak, products 87% (Dao, arXiv 2307.08691, figures 4 and 5).
ATTENTION_SHARES = 0.85, 0.7
# Keys per query at which it reaches half of that: FlashAttention-2 forward on an H100, 191 of 335 TFLOP/s at 512
# tokens with a causal mask, 309 of 370 without (Shah et al., arXiv 2407.08608, figure 5).
HALF_SPEED_KEYS = 150
ONE_PASS = {"copy", "cast", "scale", "neg", "view", "slice", "chunk", "repeat"}  # backward moves as much
COPIES = {"view", "slice", "chunk", "cat", "repeat"}
NEAREST = 6  # measured shapes between which a product's rate is interpolated


@dataclass(frozen=True)
class Work:
    """Seconds of a device, and the number of kernels that the host launches for it."""

    device: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.device + other.device, self.launches + other.launches)

    def times(self, count: float) -> Work:
        return Work(self.device * count, self.launches * count)


NOTHING = Work()


@lru_cache(maxsize=64)
def kernels_of(machine: Machine, precision: str) -> Kernels:
    return Kernels(machine, precision)


class Kernels:
    """`precision` is that of products; other operators use the bytes of their elements."""

    def __init__(self, machine: Machine, precision: str) -> None:
        self.machine = machine
        self.precision = precision if precision in machine.peak_flops else "fp32"
        self.is_gpu = machine.device != "cpu"
        self.shapes = [
            (math.log2(m), math.log2(n), math.log2(k), math.log(rate))
            for m, n, k, kind, rate in machine.gemm_table
            if kind == self.precision
        ]
        self.rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for kind, number, size, rate in machine.kernel_table:
            self.rates.setdefault((kind, number), []).append((math.log(size), math.log(rate)))
        for points in self.rates.values():
            points.sort()
        self.half = precision if precision in ("bf16", "fp16") else "bf16"
        self.product = cache(self._product)
        self._ops: dict[tuple[object, ...], tuple[Work, Work]] = {}

    # Whole operators

    def op(self, op: Op) -> tuple[Work, Work]:
        given = sum(value.needs_grad for value in op.inputs)
        size = op.outputs[0].bytes_each if op.outputs else FP32_BYTES
        key = (op.name, op.gemms, op.gemms_back, op.moved, op.moved_back, op.kernels, op.kernels_back, op.passes_on,
               op.narrows, given, size, op.gemms and op.inputs[0].bytes_each, len(op.weights),
               op.outputs[0].elements if op.outputs else 0)  # fmt: skip
        found = self._ops.get(key)
        if found is None:
            # A GPU adds a bias in the product's kernel; its gradient is a sum over rows.
            forward = self._work(op, op.name, op.gemms, op.moved, op.kernels, size, "" if self.is_gpu else "add")
            found = self._ops[key] = (forward, self._backward(op, size, given))
        return found

    def _work(
        self, op: Op, name: str, gemms: tuple[Gemm, ...], moved: float, kernels: int, size: int, bias: str
    ) -> Work:
        """One direction. `bias`: the operator that a bias adds to the product."""
        if not kernels:
            return NOTHING
        if op.name in (ATTENTION, FLASH_ATTENTION_2):
            return Work(self._attention(name, gemms, moved), kernels)
        if not op.gemms:
            return Work(self.moved(name, moved, size), kernels)
        seconds = self._products(op, gemms)
        if op.name == CHUNKED_LOSS:
            seconds += self.moved(op.name, moved, op.inputs[0].bytes_each)
        if bias and len(op.weights) > 1:
            seconds += self.moved(bias, op.outputs[0].bytes, size)
        return Work(seconds, kernels)

    def _backward(self, op: Op, size: int, given: int) -> Work:
        if not op.kernels_back or not (given or op.weights):
            return NOTHING
        if not op.gemms and (op.passes_on or op.narrows):
            # No kernel, unless two gradients meet: then the second is added to the first.
            return Work(self.moved("add", op.moved, size), 1) if given > 1 and op.passes_on else NOTHING
        name = f"{op.name}_back"
        one_pass = not op.gemms and op.name in ONE_PASS and (name, "fp32") not in self.rates
        return self._work(op, name, op.gemms_back, op.moved_back / (1 + one_pass), op.kernels_back, size, "mean")

    def _attention(self, kind: str, gemms: tuple[Gemm, ...], moved: float) -> float:
        flops, is_back = sum(gemm.flops for gemm in gemms), kind.endswith("_back")
        if rates := self.rates.get((ATTENTION + "_back" * is_back, self.precision)):
            return flops / _between(rates, gemms[0].m)
        share = ATTENTION_SHARES[is_back] * self.machine.gemm_efficiency[self.precision]
        if kind.startswith(FLASH_ATTENTION_2):
            share = min(share, self.machine.flash_attention_2.get("backward" if is_back else "forward", share))
        if self.is_gpu:
            share /= 1 + HALF_SPEED_KEYS / gemms[0].n
        arithmetic = flops / (share * self.machine.peak_flops[self.precision])
        return max(arithmetic, moved / self._bandwidth) + self._floor

    # Products

    def _products(self, op: Op, gemms: tuple[Gemm, ...]) -> float:
        """In half precision, products whose inputs are fp32 still run in fp32. The output's precision does not matter:
        that of the chunked loss differs."""
        whole = op.inputs[0].bytes_each >= FP32_BYTES and self.precision in ("bf16", "fp16")
        by = kernels_of(self.machine, "fp32") if whole else self
        return sum(by.product(gemm) for gemm in gemms)

    def _product(self, gemm: Gemm) -> float:
        if self.shapes:
            return gemm.flops / self._measured(gemm)
        size = FP32_BYTES if self.precision in ("fp32", "tf32") else 2
        moved = size * gemm.many * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
        fill = 1.0
        if self.is_gpu:
            fill = gemm.m * gemm.n / (_tiled(gemm.m) * _tiled(gemm.n))
        return max(gemm.flops / (self._peak * fill), moved / self._bandwidth) + self._floor

    def _measured(self, gemm: Gemm) -> float:
        """FLOP/s: the geometric mean of the nearest shapes, weighted by the inverse square of their distance."""
        at = (math.log2(gemm.m), math.log2(gemm.n), math.log2(gemm.k))
        near = sorted((sum((a - b) ** 2 for a, b in zip(at, shape, strict=False)), shape[3]) for shape in self.shapes)
        if near[0][0] < 1e-9:
            return math.exp(near[0][1])
        weights = [(1 / distance, rate) for distance, rate in near[:NEAREST]]
        return math.exp(sum(weight * rate for weight, rate in weights) / sum(weight for weight, _ in weights))

    # Bytes

    def moved(self, kind: str, size: float, bytes_each: int = FP32_BYTES) -> float:
        """Seconds of an operator that moves `size` bytes. An unmeasured kind counts as a copy or an addition."""
        if not size:
            return 0.0
        number = "fp32" if bytes_each >= FP32_BYTES else self.half
        plain = kind.removesuffix("_back")
        for name in (kind, plain, "copy" if plain in COPIES else "add"):
            if rates := self.rates.get((name, number)) or self.rates.get((name, "fp32")):
                return size / _between(rates, size)
        return size / self._bandwidth + self._floor

    @property
    def _floor(self) -> float:
        return KERNEL_SECONDS if self.is_gpu else 0.0

    @property
    def _peak(self) -> float:
        best = self.machine.peak_flops[self.precision] * self.machine.gemm_efficiency[self.precision]
        return best * SUSTAINED if self.is_gpu else best

    @property
    def _bandwidth(self) -> float:
        return self.machine.memory_bandwidth * self.machine.memory_efficiency


def _tiled(size: int) -> int:
    return math.ceil(size / TILE) * TILE


def _between(points: list[tuple[float, float]], size: float) -> float:
    """The rate at a size: linear between logarithms, beyond the ends the nearest."""
    at = math.log(size)
    place = bisect(points, (at, math.inf))
    if not place:
        return math.exp(points[0][1])
    if place == len(points):
        return math.exp(points[-1][1])
    (low, first), (high, last) = points[place - 1], points[place]
    return math.exp(first + (last - first) * (at - low) / (high - low))
