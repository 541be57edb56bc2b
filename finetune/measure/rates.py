"""How fast this machine runs a tape's operators: matrix products by shape, other operators by kind and size.

Each is timed in torch's eager mode, forward and backward, on operands outside the caches, while the node's other ranks
do the same, since they share its memory. An operator's size is the number of bytes that the tape says it moves, so that
the plan and the measurement agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from finetune.plan.families.parts import Sizes
from finetune.plan.forward.attention import Heads, attend
from finetune.plan.forward.parts import Batch, Setting
from finetune.plan.tape import Tape
from finetune.plan.values import Gemm, Numbers, Op, Value

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH, HEADS, KEYS, VOCABULARY = 256, 4, 128, 2048
COLD_BYTES = 32 * 2**20  # operands used in turn, larger than a core's cache
GEMM_SIZES = (64, 256, 1024, 4096)
WIDE = ((1024, 16384, 256), (1024, 256, 16384), (16384, 256, 1024))  # heads and embeddings with large vocabularies


@dataclass(frozen=True)
class Budget:
    """How long each measurement takes, and how large its operands are."""

    seconds: float = 0.01
    elements: tuple[int, ...] = (2**14, 2**18, 2**21)
    most_flops: float = 2e9
    gemm_sizes: tuple[int, ...] = GEMM_SIZES


@dataclass(frozen=True)
class Probe:
    """An operator, as torch runs it and as the tape records it. `two`: it takes a second tensor like the first."""

    name: str
    run: Callable[..., Any]
    note: Callable[[Tape, Value, int], Any]
    two: bool = False
    back: bool = True


def _heads(x: Any) -> Any:
    """(rows, WIDTH) as (batch, heads, KEYS, WIDTH / heads)."""
    return x.view(-1, min(KEYS, x.shape[0]), HEADS, WIDTH // HEADS).transpose(1, 2)


PROBES = (
    Probe("add", lambda x, y: x + y, lambda tape, x, _: tape.add(x, tape.given(x.elements)), two=True, back=False),
    Probe("mul", lambda x, y: x * y,
          lambda tape, x, _: tape.multiply(x, tape.given(x.elements, needs_grad=True)), two=True),
    Probe("scale", lambda x: x * 0.5, lambda tape, x, _: tape.scale(x)),
    Probe("pow", lambda x: x**2, lambda tape, x, _: tape.power(x)),
    Probe("rsqrt", torch.rsqrt, lambda tape, x, _: tape.unary("rsqrt", x)),
    Probe("relu", functional.relu, lambda tape, x, _: tape.unary("relu", x)),
    Probe("gelu", functional.gelu, lambda tape, x, _: tape.unary("gelu", x)),
    Probe("silu", functional.silu, lambda tape, x, _: tape.unary("silu", x)),
    Probe("tanh", torch.tanh, lambda tape, x, _: tape.unary("tanh", x)),
    Probe("exp", torch.exp, lambda tape, x, _: tape.unary("exp", x)),
    Probe("mean", lambda x: x.mean(-1), lambda tape, x, rows: tape.mean(x, rows)),
    Probe("copy", lambda x: _heads(x).contiguous(), lambda tape, x, _: tape.copy(x), back=False),
    Probe("dropout", lambda x: functional.dropout(x, 0.1), lambda tape, x, _: tape.dropout(x, 0.1)),
    Probe("layer_norm", lambda x, w: functional.layer_norm(x, (WIDTH,), w, w),
          lambda tape, x, _: tape.layer_norm(x, "norm")),
    Probe("softmax", lambda x: functional.softmax(x.view(-1, KEYS), -1), lambda tape, x, _: tape.softmax(x)),
    Probe("log_softmax", lambda x: functional.log_softmax(x.view(-1, VOCABULARY), -1),
          lambda tape, x, _: tape.op("log_softmax", (x,), x.elements, saves_output=True)),
    Probe("embedding", functional.embedding, lambda tape, _, rows: tape.embedding("words", rows)),
)  # fmt: skip


def seconds_of(run: Callable[[int], object], least: float) -> float:
    """Seconds of `run(i)`, called with 0, 1, ... at least five times and for `least` seconds: the lower quartile, since
    other load on the machine only adds time."""
    run(0)
    synchronize()
    found: list[float] = []
    end = time.perf_counter() + least
    while len(found) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        run(len(found) + 1)
        synchronize()
        found.append(time.perf_counter() - start)
    return statistics.quantiles(found, n=4)[0]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gemm_rows(device: str, precision: str, budget: Budget, meet: Callable[[], None]) -> list[list[Any]]:
    """[m, n, k, precision, FLOP/s] over a grid of shapes: the mean over the forward pass, which reads weights as stored
    (n, k), the gradient of the inputs, which reads them transposed, and the gradient of the weights."""
    rows = []
    shapes = [*product(budget.gemm_sizes, repeat=3), *(WIDE if max(budget.gemm_sizes) >= 1024 else ())]
    for m, n, k in shapes:
        shape = Gemm(m, n, k)
        if shape.flops > budget.most_flops:
            continue
        meet()
        rows.append([m, n, k, precision, round(shape.flops / gemm_seconds(shape, device, precision, budget.seconds))])
    return rows


def gemm_seconds(shape: Gemm, device: str, precision: str, least: float) -> float:
    """Seconds of one product; small ones are timed several at a time, to hide the overhead of timing."""
    kind = {"dtype": DTYPES[precision], "device": device}
    m, n, k = shape.m, shape.n, shape.k
    size = (m * k + n * k + m * n) * torch.empty((), dtype=DTYPES[precision]).element_size()
    many = max(2, min(16, COLD_BYTES // size))
    a = [torch.randn(m, k, **kind) for _ in range(many)]
    a_turned = [torch.randn(k, m, **kind) for _ in range(many)]
    b = [torch.randn(k, n, **kind) for _ in range(many)]
    b_turned = [torch.randn(n, k, **kind) for _ in range(many)]
    inner = max(1, int(2e6 // shape.flops))

    def every(left: list[Any], right: list[Any], turn_left: bool, turn_right: bool) -> Callable[[int], None]:
        def run(index: int) -> None:
            for step in range(inner):
                at = (index * inner + step) % many
                x, y = left[at], right[at]
                (x.t() if turn_left else x) @ (y.t() if turn_right else y)

        return run

    ways = (every(a, b_turned, False, True), every(a, b, False, False), every(a_turned, b, True, False))
    return statistics.mean(seconds_of(way, least / 2) for way in ways) / inner


def kernel_rows(device: str, precision: str, budget: Budget, meet: Callable[[], None]) -> Iterator[list[Any]]:
    """[kind, precision, bytes moved, bytes per second], with launch overhead subtracted."""
    numbers = Numbers(torch.empty((), dtype=DTYPES[precision]).element_size(), "cpu" if device == "cpu" else "cuda")
    for probe in PROBES:
        tiny = _timed(probe, 4 * VOCABULARY, device, precision, budget.seconds / 4)
        for elements in budget.elements:
            meet()
            found = _timed(probe, elements, device, precision, budget.seconds)
            op = _noted(probe, elements, numbers)
            for name, moved, seconds, launch in (
                (probe.name, op.moved, found[0], tiny[0]),
                (f"{probe.name}_back", op.moved_back, found[1], tiny[1]),
            ):
                if seconds:  # an operator on a few thousand elements is nearly all launch
                    net = seconds - launch * (1 - 4 * VOCABULARY / elements)
                    yield [name, precision, moved, round(moved / max(net, seconds / 4))]


def _noted(probe: Probe, elements: int, numbers: Numbers) -> Op:
    shapes = {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,), "words.weight": (VOCABULARY, WIDTH)}
    tape = Tape(numbers, shapes)
    with tape.segment("probe"):
        probe.note(tape, tape.given(elements, needs_grad=True), elements // WIDTH)
    return next(op for op in tape.ops if op.name == probe.name)


def _timed(probe: Probe, elements: int, device: str, precision: str, least: float) -> list[float]:
    """Seconds of the forward and of the backward pass, 0 without one. Outputs are kept for a while, as in a real
    forward pass, so that each has its own memory."""
    kind = {"dtype": DTYPES[precision], "device": device}
    many = max(2, min(32, COLD_BYTES // (elements * 4)))
    rows = elements // WIDTH
    operands = [[torch.randn(rows, WIDTH, **kind).requires_grad_()] for _ in range(many)]
    for group in operands:
        if probe.two:
            group.append(torch.randn(rows, WIDTH, **kind).requires_grad_())
        if probe.name == "layer_norm":
            group.append(torch.randn(WIDTH, **kind).requires_grad_())
        if probe.name == "embedding":
            group[0] = torch.randint(0, VOCABULARY, (rows,), device=device)
            group.append(torch.randn(VOCABULARY, WIDTH, **kind).requires_grad_())
        if probe.name == "rsqrt":
            group[0] = group[0].detach().abs().requires_grad_()
    outputs: list[Any] = [None] * many

    def forward(index: int) -> None:
        outputs[index % many] = probe.run(*operands[index % many])

    found = [seconds_of(forward, least)]
    for index in range(many):
        forward(index)
    grads = [torch.randn_like(out) for out in outputs[:2]]

    def backward(index: int) -> None:
        wanted = [x for x in operands[index % many] if x.requires_grad]
        torch.autograd.grad(outputs[index % many], wanted, grads[index % 2], retain_graph=True)

    return [*found, seconds_of(backward, least) if probe.back else 0.0]


def attention_rows(device: str, precision: str, budget: Budget, meet: Callable[[], None]) -> Iterator[list[Any]]:
    """[kind, precision, tokens, FLOP/s] of causal fused attention, forward and backward."""
    for tokens in (64, 128, 256, 512, 1024):
        meet()
        batch = max(1, min(8, max(budget.elements) // (tokens * WIDTH)))
        shape = (batch, tokens, HEADS, WIDTH // HEADS)
        kind = {"dtype": DTYPES[precision], "device": device}
        sets = [[torch.randn(shape, **kind).transpose(1, 2).requires_grad_() for _ in range(3)] for _ in range(4)]

        def run(index: int, sets: list[Any] = sets) -> Any:
            query, key, value = sets[index % 4]
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        made = [run(index) for index in range(4)]
        given = torch.randn_like(made[0])

        def back(index: int, sets: list[Any] = sets, made: list[Any] = made, given: Any = given) -> Any:
            return torch.autograd.grad(made[index % 4], sets[index % 4], given, retain_graph=True)

        tape, samples = Tape(Numbers(given.element_size(), device), {}), Batch(batch, tokens)
        heads = Heads(samples, HEADS, WIDTH // HEADS, HEADS)
        with tape.segment("probe"):
            x = tape.given(batch * tokens * WIDTH, needs_grad=True)
            attend(Setting(tape, Sizes({}, "probe"), samples), heads, x, x, x)
        op = next(op for op in tape.ops if op.name == "attention")
        for name, gemms, seconds in (
            ("attention", op.gemms, seconds_of(run, budget.seconds)),
            ("attention_back", op.gemms_back, seconds_of(back, budget.seconds)),
        ):
            yield [name, precision, tokens, round(sum(gemm.flops for gemm in gemms) / seconds)]
