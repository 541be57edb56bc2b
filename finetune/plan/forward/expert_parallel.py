"""Mixtures of experts in expert parallelism (--expert_parallel_size): what one rank holds, and its operators in place
of those that a trace has.

Follows DeepSpeed's AutoEP (0.19.8, module_inject/auto_ep_layer.py, AutoEPMoELayer; moe/ep_*.py, GroupedExperts): a
layer's `gate_up_proj` becomes `w1` and `w3`, `down_proj` becomes `w2`, and the router's `gate` is `router.gate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from finetune.plan.forward.parts import Setting
from finetune.plan.forward.player import Player
from finetune.plan.model import Buffer, Model, Tensor
from finetune.plan.tape import Tape
from finetune.plan.values import DISPATCH, FP32_BYTES, INT64_BYTES, Gemm, Value

PLANNED = ("mixtral", "qwen3_moe", "olmoe")
BOTH, BELOW, GATE = ".experts.gate_up_proj", ".experts.down_proj", ".mlp.gate.weight"
ROUTER = ".router.gate.weight"
ALIGNED = 8  # rows to which the tokens of each expert are padded (moe/ep_kernels.py, TOKEN_GROUP_ALIGN_SIZE_M)
INT32_BYTES = 4


@lru_cache(maxsize=16)
def held_by_rank(model: Model, size: int) -> Model:
    """The model as one of `size` ranks holds it that hold each layer's experts together."""
    tensors = tuple(part for tensor in model.tensors for part in _parts(tensor, size))
    counts = tuple(
        Buffer(f"{tensor.name.removesuffix(BOTH)}.tokens_per_expert", tensor.shape[:1], FP32_BYTES)
        for tensor in model.tensors
        if tensor.name.endswith(BOTH)
    )
    return replace(model, tensors=tensors, buffers=(*model.buffers, *counts))


def _parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    if tensor.name.endswith(GATE):
        yield replace(tensor, name=tensor.name.replace(".gate.weight", ROUTER))
    elif tensor.name.endswith(BOTH):
        many, inner, hidden = tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2]
        place = tensor.name.removesuffix("gate_up_proj")
        for name, sides in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            yield replace(tensor, name=place + name, shape=(many // size, *sides), holders=size)
    elif not tensor.name.endswith(BELOW):
        yield tensor


def is_expert_parallel(player: Player, op: Any) -> bool:
    """Whether it is the router of experts that ranks hold together."""
    return bool(op["weights"]) and f"{_mixture_of(op)}.experts.w1" in player.tape.shapes


def _mixture_of(op: Any) -> str:
    """The name of the module that has this router; of another operator, a name that no mixture has."""
    return str(op["weights"][-1].removesuffix(".gate.weight"))


def play_expert_parallel(player: Player, ops: Sequence[Any]) -> int:
    """Plays a layer's mixture, whose router is the first of `ops`, in expert parallelism; returns in place of how many
    of them. It ends where the next operator reads what was there before, besides what the router reads."""
    x, made = ops[0]["in"][0], {number for op in ops for number in op["out"]}
    values, own = player.trace.values, set(ops[0]["out"])
    for place, op in enumerate(ops[1:], 1):
        older = [one for one in op["in"] if one not in made and values[one][2] != values[x][2]]
        if older and (mine := own & set(op["in"])):
            player.put(mine.pop(), expert_parallel(player.setting, _mixture_of(ops[0]), player.values[x]))
            return place
        own |= set(op["out"])
    raise AssertionError("a mixture's output is added to the layer's input")


def expert_parallel(setting: Setting, name: str, x: Value) -> Value:
    """The module `name`, a mixture of which this rank holds a part of the experts. It sends each token to the ranks of
    the experts that the token chose, computes what it gets, and sends that back."""
    tape, sizes, hidden = setting.tape, setting.sizes, x.elements // setting.batch.positions
    is_mixtral = setting.family == "mixtral"
    pairs = setting.batch.positions * sizes("num_experts_per_tok", default=2 if is_mixtral else 8)
    numbers, shares = _routed(tape, name, x, pairs, sizes.is_on("norm_topk_prob", is_mixtral))
    order = tape.op("sort", (), pairs, bytes_each=INT64_BYTES, needs_grad=False, scratch=2 * INT64_BYTES * pairs)
    by_expert = [tape.op("index", (order, one), pairs, bytes_each=one.bytes_each, needs_grad=False)
                 for one in (shares, numbers)]  # fmt: skip
    place = tape.op("div", (order,), pairs, needs_grad=False)
    sent = tape.op("index", (x,), pairs * hidden, saves=(place,), scratch_back=x.bytes)
    received = _exchange(tape, sent, round(pairs * setting.batch.load) * hidden)
    computed, *held = _computed(tape, name, received, hidden)
    back = _exchange(tape, computed, sent.elements)
    placed = tape.op("index_put", (back,), back.elements, saves=(order,))
    weighed = tape.multiply(placed, shares)
    out = tape.op("sum", (weighed,), x.elements, narrows=True)  # its gradient is expanded as a view
    tape.hold(*by_expert, *held, numbers, back, placed)
    return tape.cast(out, x.bytes_each)


def _routed(tape: Tape, name: str, x: Value, pairs: int, normalizes: bool) -> tuple[Value, Value]:
    """Numbers and shares of the experts that each token chose (TokenChoiceTopKRouter.forward)."""
    chances = tape.softmax(tape.cast(tape.linear(x, f"{name}.router.gate"), FP32_BYTES))
    best = tape.op("topk", (chances,), pairs, needs_grad=False)
    numbers = tape.op("topk", (chances,), pairs, bytes_each=INT64_BYTES, needs_grad=False)
    shares = tape.op("gather", (chances,), pairs, saves=(numbers,))
    if normalizes:
        total = tape.op("sum", (shares,), x.elements // tape.shapes[f"{name}.router.gate.weight"][1])
        total = tape.op("shift", (total,), total.elements, passes_on=True)  # plus a small number
        shares = tape.op("div", (shares, total), pairs, saves=(shares, total), scratch_back=3 * shares.bytes)
    shares = tape.scale(shares)
    tape.op("count", (numbers,), 1, needs_grad=False, scratch=INT32_BYTES * pairs)
    tape.hold(best, chances)
    return numbers, shares


def _exchange(tape: Tape, given: Value, elements: int) -> Value:
    return tape.op(DISPATCH, (given,), elements, kernels=0, kernels_back=0, moved=0, moved_back=0)


def _computed(tape: Tape, name: str, received: Value, hidden: int) -> tuple[Value, ...]:
    """What this rank's experts make of the rows that it received, and what variables hold. Rows are sorted by expert,
    and padded: on a GPU by a kernel that gathers them, on a CPU with a row of zeros at the end."""
    rows, is_cuda = received.elements // hidden, tape.numbers.device == "cuda"
    padded = (rows + (tape.shapes[f"{name}.experts.w1"][0] + 1) * ALIGNED - 1) // ALIGNED * ALIGNED
    order = tape.op("rows", (), padded, bytes_each=INT32_BYTES, needs_grad=False)
    if is_cuda:
        given = _gathered_rows(tape, received, order, padded * hidden)
    else:
        joined = tape.op("cat", (received,), received.elements + hidden, narrows=True)
        given = tape.op("index", (joined,), padded * hidden, saves=(order,), scratch_back=joined.bytes)
        tape.hold(received)
    gate, up = (grouped(tape, given, f"{name}.experts.{part}", rows) for part in ("w1", "w3"))
    if is_cuda:  # ops/triton_ops/swiglu_triton.py
        mixed = tape.op("swiglu", (gate, up), gate.elements, saves=(gate, up))
    else:
        mixed = tape.multiply(tape.unary("silu", gate), up)
    out = grouped(tape, mixed, f"{name}.experts.w2", rows)
    tape.hold(gate, up, mixed)
    if is_cuda:
        return _gathered_rows(tape, out, order, received.elements), order, given
    restored = tape.op("index_put", (out,), received.elements + hidden, saves=(order,))
    tape.hold(out)
    return tape.alias(restored, received.elements, "slice"), order, given


def _gathered_rows(tape: Tape, given: Value, order: Value, elements: int) -> Value:
    """permute_rows and unpermute_rows, both with the inverse of the order (moe/ep_kernels.py, inverse_permutation)."""
    rows = order.elements
    inverse = tape.op("inverse", (), 2 * rows, bytes_each=INT64_BYTES, needs_grad=False, scratch=4 * INT64_BYTES * rows)
    return tape.op("gather_rows", (given,), elements, saves=(order, inverse))


def grouped(tape: Tape, x: Value, weight: str, computed: int) -> Value:
    """Each expert's rows times its matrix; of padded rows only `computed` count."""
    many, fan_out, fan_in = tape.shapes[weight]
    rows = x.elements // fan_in
    each = max(computed // many, 1)
    product, trains = Gemm(each, fan_out, fan_in, many), tape.trains(weight)
    return tape.op("grouped_mm", (x,), rows * fan_out, saves=(x,) if trains else (), weights=(weight,),
                   module=weight.rpartition(".")[0], gemms=(product,), gemms_back=product.back(x.needs_grad, trains),
                   moved=x.bytes + (rows + many * fan_in) * fan_out * x.bytes_each)  # fmt: skip
