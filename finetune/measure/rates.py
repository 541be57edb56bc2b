"""How fast this machine multiplies matrices, and streams tensors through operators, in torch's eager mode: on operands
outside the caches, while the node's other ranks do the same, since they share its memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from transformers.utils import enable_tf32

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH = 256
COLD_BYTES = 32 * 2**20  # operands used in turn, larger than a core's cache
GPU_TIMES = 32  # as many elements as on a CPU, else the start of a kernel would take longer than the kernel
CALLS = {"cpu": 1, "cuda": 8}  # between two waits, for the same reason
# Rows, fan-out and fan-in of linear layers: a small model's on a CPU, a large one's on a GPU.
LAYERS = {
    "cpu": ((1024, 256, 256), (1024, 1024, 256), (1024, 256, 1024), (1024, 1024, 1024), (256, 4096, 256)),
    "cuda": ((8192, 4096, 4096), (8192, 16384, 4096), (8192, 4096, 16384), (4096, 32768, 2048)),
}
OPERATORS: tuple[Callable[[Any], Any], ...] = (  # each reads one tensor and writes one
    lambda x: x * 2,
    functional.gelu,
    lambda x: functional.layer_norm(x, (WIDTH,)),
    lambda x: functional.softmax(x, -1),
)


@dataclass(frozen=True)
class Budget:
    """How long each measurement takes, how many elements operators stream, and how many layers are tried."""

    seconds: float = 0.1
    elements: int = 2**21
    layers: int = 5


def seconds_of(run: Callable[[int], object], least: float, calls: int = 1) -> float:
    """Seconds of `run(i)`, called with 0, 1, ... at least five times and for `least` seconds: the lower quartile, since
    other load on the machine only adds time. A GPU is waited for after each `calls`."""
    run(0)
    synchronize()
    found: list[float] = []
    end = time.perf_counter() + least
    while len(found) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        for number in range(calls):
            run(1 + calls * len(found) + number)
        synchronize()
        found.append((time.perf_counter() - start) / calls)
    return statistics.quantiles(found, n=4)[0]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def product_rates(device: str, precision: str, budget: Budget) -> list[float]:
    """FLOP/s of each layer: of its forward pass and of both gradients."""
    kind: dict[str, Any] = {"dtype": DTYPES[precision], "device": device}
    ways: tuple[Callable[[Any, Any, Any], Any], ...] = (
        lambda x, w, g: x @ w.t(),
        lambda x, w, g: g @ w,
        lambda x, w, g: g.t() @ x,
    )
    found = []
    if precision == "tf32":
        enable_tf32(True)
    for m, n, k in LAYERS[device][: budget.layers]:
        many = max(2, COLD_BYTES // (DTYPES[precision].itemsize * (m * k + n * k + m * n)))
        sets = [(torch.randn(m, k, **kind), torch.randn(n, k, **kind), torch.randn(m, n, **kind)) for _ in range(many)]
        seconds = sum(_seconds_in_turn(way, sets, device, budget) for way in ways)
        found.append(len(ways) * 2 * m * n * k / seconds)
    if precision == "tf32":
        enable_tf32(False)
    return found


def stream_rate(device: str, budget: Budget) -> float:
    """Bytes per second that operators on fp32 read and write: the geometric mean."""
    elements = budget.elements * (1 if device == "cpu" else GPU_TIMES)
    many = max(2, COLD_BYTES // (4 * elements))
    sets = [(torch.randn(elements // WIDTH, WIDTH, device=device),) for _ in range(many)]
    each = [_seconds_in_turn(run, sets, device, budget) for run in OPERATORS]
    return statistics.geometric_mean(2 * 4 * elements / seconds for seconds in each)


def _seconds_in_turn(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]], device: str, budget: Budget) -> float:
    """Seconds of `run` on one set of operands after the other, begun by all ranks at once."""
    distributed.barrier()
    return seconds_of(lambda index: run(*sets[index % len(sets)]), budget.seconds, CALLS[device])
