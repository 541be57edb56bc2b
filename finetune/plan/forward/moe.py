"""Mixtures of experts as grouped matrix products (transformers, integrations/moe.py, grouped_mm_experts_forward)."""

from __future__ import annotations

from finetune.plan.forward.parts import Setting, activation
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES, INT64_BYTES, Gemm, Value


def experts(setting: Setting, name: str, x: Value, width: str, act: str) -> Value:
    """Each token goes to the `num_experts_per_tok` likeliest experts. How many tokens each gets makes no difference to
    memory or products."""
    tape, sizes, rows = setting.tape, setting.sizes, setting.batch.positions
    chosen = sizes("num_experts_per_tok", default=2 if width == "intermediate_size" else 8)
    pairs = rows * chosen
    logits = tape.linear(x, f"{name}.gate")
    shares = tape.softmax(tape.cast(logits, FP32_BYTES))
    best = tape.op("topk", (shares,), pairs, extra_saved=INT64_BYTES * pairs)
    is_mixtral = width == "intermediate_size"
    if sizes.is_on("norm_topk_prob", is_mixtral):
        total = tape.op("sum", (best,), rows)
        best = tape.op("div", (best, total), pairs, saves=(best, total), scratch_back=3 * best.bytes)
    if not is_mixtral:  # models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeTopKRouter
        best = tape.cast(best, logits.bytes_each)
    order = tape.op("sort", (), pairs, bytes_each=INT64_BYTES, needs_grad=False, scratch=2 * INT64_BYTES * pairs)
    picked = tape.op("index", (x,), x.elements * chosen, saves=(order,), scratch_back=x.bytes)
    share = tape.op("index", (best,), pairs, saves=(order,))
    both = _grouped(tape, picked, f"{name}.experts.gate_up_proj")
    gate, up = tape.chunk(both, *[both.elements // 2] * 2)
    mixed = tape.multiply(activation(tape, sizes.word("hidden_act", act), gate), up)
    out = _grouped(tape, mixed, f"{name}.experts.down_proj")
    weighed = tape.multiply(out, share)
    inverse = tape.op("inverse", (), pairs, bytes_each=INT64_BYTES, needs_grad=False)
    back = tape.op("index", (weighed,), weighed.elements, saves=(inverse,), scratch_back=weighed.bytes)
    tape.hold(picked, out, weighed)
    return tape.cast(tape.op("sum", (back,), x.elements), x.bytes_each)


def _grouped(tape: Tape, x: Value, weight: str) -> Value:
    """Each expert's share of the rows times its matrix (fan_out, fan_in)."""
    many, fan_out, fan_in = tape.shapes[weight]
    rows = x.elements // fan_in
    each = max(rows // many, 1)
    of_input, of_weight = Gemm(each, fan_in, fan_out, many), Gemm(fan_out, fan_in, each, many)
    trains = tape.trains(weight)
    back = (*([of_input] if x.needs_grad else []), *([of_weight] if trains else []))
    return tape.op("grouped_mm", (x,), rows * fan_out, saves=(x,) if trains else (), weights=(weight,),
                   module=weight.rpartition(".")[0], gemms=(Gemm(each, fan_out, fan_in, many),), gemms_back=back,
                   moved=x.bytes + (rows + many * fan_in) * fan_out * x.bytes_each)  # fmt: skip
