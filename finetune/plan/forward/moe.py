"""Mixtures of experts as grouped matrix products (transformers, integrations/moe.py, grouped_mm_experts_forward), also
spread over ranks (deepspeed 0.19.8, module_inject/auto_ep_layer.py, _forward, and moe/ep_*.py)."""

from __future__ import annotations

import math

from finetune.plan.forward.parts import Setting, activation
from finetune.plan.tape import Tape
from finetune.plan.values import ALL_TO_ALL, FP32_BYTES, INT64_BYTES, Gemm, Value

ALIGNED = 8  # rows to which the tokens of each expert are padded (moe/ep_kernels.py, TOKEN_GROUP_ALIGN_SIZE_M)
INT32_BYTES = 4


def experts(setting: Setting, name: str, x: Value, width: str, act: str) -> Value:
    """Each token goes to the `num_experts_per_tok` likeliest experts. How many tokens each expert gets changes neither
    memory nor products."""
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    chosen = sizes("num_experts_per_tok", default=2 if width == "intermediate_size" else 8)
    pairs = rows * chosen
    if f"{name}.experts.w1" in tape.shapes:
        return _spread(setting, name, x, chosen, sizes.is_on("norm_topk_prob", width == "intermediate_size"))
    logits = tape.linear(x, f"{name}.gate")
    shares = tape.softmax(tape.cast(logits, FP32_BYTES))
    best = tape.op("topk", (shares,), pairs, extra_saved=INT64_BYTES * pairs)
    is_mixtral = width == "intermediate_size"
    if sizes.is_on("norm_topk_prob", is_mixtral):
        total = tape.op("sum", (best,), rows)
        best = tape.op("div", (best, total), pairs, saves=(best, total), scratch_back=3 * best.bytes)
    if not is_mixtral:  # models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeTopKRouter
        best = tape.cast(best, logits.bytes_each)
    _, picked, share = _sorted(tape, x, best, chosen)
    both = _grouped(tape, picked, f"{name}.experts.gate_up_proj")
    gate, up = tape.chunk(both, *[both.elements // 2] * 2)
    mixed = tape.multiply(activation(tape, sizes.word("hidden_act", act), gate), up)
    out = _grouped(tape, mixed, f"{name}.experts.down_proj")
    return _back(tape, x, out, share, picked)


def _spread(setting: Setting, name: str, x: Value, chosen: int, normalizes: bool) -> Value:
    """Experts of which this rank holds a part (finetune.plan.apart). It sends each token to the ranks of the experts
    that the token chose, computes what it gets, and sends that back."""
    tape, hidden = setting.tape, x.elements // setting.batch.positions
    pairs = setting.batch.positions * chosen
    numbers, shares = _routed(tape, name, x, pairs, normalizes)
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
        total = tape.shift(tape.op("sum", (shares,), x.elements // tape.shapes[f"{name}.router.gate.weight"][1]))
        shares = tape.op("div", (shares, total), pairs, saves=(shares, total), scratch_back=3 * shares.bytes)
    shares = tape.scale(shares)
    tape.op("count", (numbers,), 1, needs_grad=False, scratch=INT32_BYTES * pairs)
    tape.hold(best, chances)
    return numbers, shares


def _exchange(tape: Tape, given: Value, elements: int) -> Value:
    return tape.op(ALL_TO_ALL, (given,), elements, kernels=0, kernels_back=0, moved=0, moved_back=0)


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
    gate, up = (_grouped(tape, given, f"{name}.experts.{part}", rows) for part in ("w1", "w3"))
    if is_cuda:  # ops/triton_ops/swiglu_triton.py
        mixed = tape.op("swiglu", (gate, up), gate.elements, saves=(gate, up))
    else:
        mixed = tape.multiply(tape.unary("silu", gate), up)
    out = _grouped(tape, mixed, f"{name}.experts.w2", rows)
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


def oss_experts(setting: Setting, name: str, x: Value) -> Value:
    """gpt-oss (models/gpt_oss/modeling_gpt_oss.py): the softmax covers only the chosen experts, and biases are gathered
    to the shape of the products."""
    tape = setting.tape
    chosen = setting.sizes("num_experts_per_tok", default=4)
    pairs = setting.batch.positions * chosen
    logits = tape.linear(x, f"{name}.router")
    best = tape.op("topk", (logits,), pairs, extra_saved=INT64_BYTES * pairs)
    shares = tape.softmax(best)
    order, picked, share = _sorted(tape, x, shares, chosen)
    bias = _bias(tape, f"{name}.experts.gate_up_proj_bias", order)
    both = tape.add_in_place(_grouped(tape, picked, f"{name}.experts.gate_up_proj"), bias)
    mixed = _clamped_gate(tape, both)
    bias_below = _bias(tape, f"{name}.experts.down_proj_bias", order)
    tape.hold(bias)
    out = tape.add_in_place(_grouped(tape, mixed, f"{name}.experts.down_proj"), bias_below)
    return _back(tape, x, out, share, bias_below, picked, best, logits)


def _clamped_gate(tape: Tape, both: Value) -> Value:
    """(up + 1) * gate * sigmoid(alpha * gate), gate and up clamped (GptOssExperts._apply_gate)."""
    half = both.elements // 2
    gate, up = (tape.unary("clamp", tape.alias(both, half, "slice")) for _ in range(2))
    glu = tape.multiply(gate, tape.unary("sigmoid", tape.scale(gate)))
    mixed = tape.multiply(tape.shift(up), glu)
    tape.hold(both, gate, up, glu)
    return mixed


def _bias(tape: Tape, name: str, order: Value) -> Value:
    """The bias of each pair's expert. It is gathered before the product, so its gradient comes after the product's."""
    return tape.op("index", (), order.elements * tape.shapes[name][1], saves=(order,), weights=(name,),
                   module=name.rpartition(".")[0])  # fmt: skip


def _sorted(tape: Tape, x: Value, shares: Value, chosen: int) -> tuple[Value, Value, Value]:
    """Pairs of token and expert, sorted by expert: their order, and the token and share of each."""
    pairs = shares.elements
    order = tape.op("sort", (), pairs, bytes_each=INT64_BYTES, needs_grad=False, scratch=2 * INT64_BYTES * pairs)
    picked = tape.op("index", (x,), x.elements * chosen, saves=(order,), scratch_back=x.bytes)
    return order, picked, tape.op("index", (shares,), pairs, saves=(order,))


def _back(tape: Tape, x: Value, out: Value, share: Value, *named: Value) -> Value:
    """The experts' output, weighted and summed at each token's place. Variables keep `named` until then."""
    weighed = tape.multiply(out, share)
    inverse = tape.op("inverse", (), share.elements, bytes_each=INT64_BYTES, needs_grad=False)
    back = tape.op("index", (weighed,), weighed.elements, saves=(inverse,), scratch_back=weighed.bytes)
    tape.hold(*named, out, weighed)
    return tape.cast(tape.op("sum", (back,), x.elements), x.bytes_each)


def _grouped(tape: Tape, x: Value, weight: str, computed: int | None = None) -> Value:
    """Each expert's rows times its matrix, which may be transposed; of padded rows only `computed` count."""
    many, *sides = tape.shapes[weight]
    fan_in = sides[0] if f"{weight}_bias" in tape.shapes else sides[1]
    fan_out = math.prod(sides) // fan_in
    rows = x.elements // fan_in
    each = max((computed or rows) // many, 1)
    of_input, of_weight = Gemm(each, fan_in, fan_out, many), Gemm(fan_out, fan_in, each, many)
    trains = tape.trains(weight)
    back = (*([of_input] if x.needs_grad else []), *([of_weight] if trains else []))
    return tape.op("grouped_mm", (x,), rows * fan_out, saves=(x,) if trains else (), weights=(weight,),
                   module=weight.rpartition(".")[0], gemms=(Gemm(each, fan_out, fan_in, many),), gemms_back=back,
                   moved=x.bytes + (rows + many * fan_in) * fan_out * x.bytes_each)  # fmt: skip
