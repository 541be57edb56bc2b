"""Operators of a trace on a tape, by name: with weights, without, and any other as autograd has saved for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from finetune.plan.families.parts import IMAGES
from finetune.plan.forward.attention import FUSED, Heads, attend, kind_of
from finetune.plan.forward.cuts import LINEAR, SOFTMAX
from finetune.plan.forward.player import Player
from finetune.plan.values import ATTENTION, FP32_BYTES, HALF_BYTES, Gemm, Value

CONVOLUTION = "convolution"
IN_HALF = (*LINEAR, "bmm", "baddbmm", CONVOLUTION)  # under autocast (aten/src/ATen/autocast_mode.h)
IN_FP32 = ("_log_softmax", "nll_loss_forward")  # likewise
# On a GPU also these, besides norms (AT_FORALL_FP32): GPT-2's gelu_new has a power.
IN_FP32_ON_GPU = ("pow", "exp", "expm1", "log", "log1p", "rsqrt", "reciprocal", "softplus", "cumsum", "logsumexp")
AUTOCAST = {**dict.fromkeys(IN_HALF, HALF_BYTES), **dict.fromkeys(IN_FP32, FP32_BYTES)}
PRODUCTS = (*IN_HALF, "_grouped_mm")
TURNS = ("transpose", "permute")
CAST, LAYER_NORM = "_to_copy", "native_layer_norm"
NAMES = {"clone": "copy", CAST: "cast", "_log_softmax": "log_softmax", "_grouped_mm": "grouped_mm",
         "baddbmm": "matmul"}  # fmt: skip
PASSES_ON = ("add", "sub", "clone", "add_", "copy_")
FLOATS = (HALF_BYTES, FP32_BYTES)
# Tensors as large as the input that a backward pass makes on its way (torch 2.13, tools/autograd/derivatives.yaml).
BETWEEN = {"logsumexp": 2, "rsqrt": 2, "cos": 2, "sin": 1, "sqrt": 1, "abs": 1}


def linear(player: Player, op: Any, inputs: list[Value]) -> Value:
    weights, fan_out = op["weights"], player.sizes(op)[1]
    bias = weights[0] if len(weights) > 1 else ""
    return player.tape.linear(inputs[0], _module(op), weights[-1], bias, fan_out)


def layer_norm(player: Player, op: Any, inputs: list[Value]) -> Value | None:
    """A kernel first copies what is laid out otherwise, such as channels that were last."""
    if len(op["in"]) > 1:
        return None
    return player.tape.layer_norm(inputs[0], _module(op), inputs[0].bytes if "copies" in op else 0)


def weigh(player: Player, op: Any, inputs: list[Value]) -> Value | None:
    module = _module(op)
    return player.tape.weigh(inputs[0], module) if op["weights"][-1] == f"{module}.weight" else None


def dropout(player: Player, op: Any, inputs: list[Value]) -> Value:
    return player.tape.dropout(inputs[0], player.dropout)


def attention(player: Player, op: Any, inputs: list[Value]) -> Value:
    masks = player.masks if len(inputs) == len("qkv") else ()
    return attend(player.setting, _heads(player, op), *inputs, *masks)


def multiply(player: Player, op: Any, inputs: list[Value]) -> Value | None:
    if len(inputs) == 1:
        return None
    return player.tape.multiply(inputs[0], inputs[1], player.elements(op["out"][0]))


def matmul(player: Player, op: Any, inputs: list[Value]) -> Value:
    gemm = Gemm(*player.sizes(op))
    return player.tape.matmul(inputs[0], inputs[1], gemm, casts=not op["inside"])  # positions are turned in fp32


def power(player: Player, op: Any, inputs: list[Value]) -> Value:
    """Its gradient is grad * (n * x**(n-1)), with two intermediate tensors (FunctionsManual.cpp, pow_backward)."""
    x = _as_computed(player, op, inputs)[0]
    return player.tape.unary("pow", x, scratch_back=2 * x.bytes)


def softmax(player: Player, op: Any, inputs: list[Value]) -> Value:
    numbers, tape = player.numbers, player.tape
    full = FP32_BYTES if player.trace.values[op["out"][0]][1] == FP32_BYTES else None
    widens = numbers.autocast and numbers.device == "cuda" and not (full and numbers.is_fp16)
    return tape.softmax(tape.cast(inputs[0], FP32_BYTES) if widens else inputs[0], full)


Handler = Callable[[Player, Any, list[Value]], Value | None]
WEIGHED: dict[str, Handler] = {**dict.fromkeys(LINEAR, linear), LAYER_NORM: layer_norm, "mul": weigh}
# Their backward pass is known better than what autograd saves.
PLAIN: dict[str, Handler] = {"dropout": dropout, ATTENTION: attention, "mul": multiply, "bmm": matmul, "pow": power,
                             SOFTMAX: softmax}  # fmt: skip


def converted(player: Player, number: int, x: Value, whole: int) -> tuple[Value, int]:
    """The trace is in bf16: what it converts from fp32 goes back to the precision that it had. On a GPU one kernel
    reads fp16 and writes a softmax in fp32 (aten/src/ATen/native/SoftMax.cpp)."""
    tape, numbers, size = player.tape, player.numbers, player.trace.values[number][1]
    if size == FP32_BYTES:
        joined = number in player.seen.in_softmax and numbers.is_fp16 and numbers.device == "cuda"
        return (x if joined else tape.cast(x, size)), whole or x.bytes_each * (x.bytes_each in FLOATS)
    if size != HALF_BYTES:
        return tape.op("cast", (x,), x.elements, bytes_each=size, needs_grad=False), 0
    return tape.cast(x, whole if numbers.autocast and whole else numbers.bytes_each), 0


def copies_back(player: Player, op: Any) -> bool:
    """Whether the gradient of a transposed value has another layout. Fused attention's has not."""
    reader = player.seen.attentions.get(op["out"][0])
    if reader is None:
        return not player.seen.attentions
    is_given = len(reader["in"]) > len("qkv")
    trains = is_given and bool(player.trace.values[reader["in"][-1]][3])
    return kind_of(player.tape, _heads(player, reader), is_given or bool(player.masks), trains) != FUSED


def any_other(player: Player, op: Any, inputs: list[Value]) -> Value:
    """Saves what autograd saves, if it is still needed."""
    tape, name, weights = player.tape, op["name"], op["weights"]
    first, *others = op["out"]
    _, traced, place, grad = player.trace.values[first][:4]
    saved = [Value(0, 1, player.storages[one]) for one in dict.fromkeys(op["saved"]) if one in player.storages]
    if inputs and place == player.trace.values[op["in"][0]][2]:
        return tape.add_in_place(inputs[0], inputs[-1], saved)
    inputs = _as_computed(player, op, inputs)
    is_leaf = name == "embedding" and bool(weights) and tape.makes_leaf(_module(op))
    trains = any(map(tape.trains, weights))
    grad = bool(grad) and (trains or is_leaf or any(one.needs_grad for one in inputs))
    kept = [number for number in others if player.trace.values[number][2] in op["saved"]]
    width = _width(player, op, traced, inputs)
    out = tape.op(
        NAMES.get(name, name), inputs, player.elements(first), **_products(player, op, inputs, grad, trains),
        saves=() if weights and not trains and name in PRODUCTS else saved,
        saves_output=is_leaf or place in op["saved"], bytes_each=width, needs_grad=grad,
        extra_saved=sum(player.elements(one) * player.trace.values[one][1] for one in kept),
        weights=tuple(weights[::-1]), module=_module(op) if weights else "", passes_on=name in PASSES_ON,
        narrows=name in ("cat", "stack"), scratch=inputs[0].bytes if name == "dropout" else 0,  # the mask, not saved
        scratch_back=_scratch_back(player, op, inputs, width / traced),
    )  # fmt: skip
    beside = tape.segments[-1].ops[-1].outputs
    for number in others:
        player.put(number, Value(player.elements(number), player.trace.values[number][1], beside[-1].storage, False))
    return out


def _module(op: Any) -> str:
    return str(op["weights"][-1].rpartition(".")[0])


def _heads(player: Player, op: Any) -> Heads:
    scores, mix = (Gemm(*player.sizes(op, at)) for at in (0, 1))
    query, key = map(player.elements, op["in"][:2])
    how = {**op["heads"], "dropout": op["heads"]["dropout"] and player.dropout}
    return Heads(scores, mix, key * scores.m != query * scores.n, **how)


def _as_computed(player: Player, op: Any, inputs: list[Value]) -> list[Value]:
    """Autocast converts inputs; `_grouped_mm` gets them in its weights' precision (transformers 5.23,
    integrations/moe.py, _grouped_mm)."""
    tape, name = player.tape, op["name"]
    width = AUTOCAST.get(name)
    if name in IN_FP32_ON_GPU and player.numbers.device == "cuda":
        width = FP32_BYTES
    if player.numbers.autocast and width:
        inputs = [tape.cast(one, width) if one.bytes_each in FLOATS else one for one in inputs]
    if name == "_grouped_mm" and op["weights"]:
        return [tape.cast(inputs[0], tape.bytes_of(op["weights"][0])), *inputs[1:]]
    return inputs


def _scratch_back(player: Player, op: Any, inputs: list[Value], wider: float) -> int:
    """Bytes that its backward pass takes besides the gradients of its inputs. `wider`: how much a model's own function
    is than in the trace."""
    if "back" not in op:
        return BETWEEN[op["name"]] * inputs[0].bytes if op["name"] in BETWEEN and inputs else 0
    return max(
        round(player.size(op["back"], op["out"][0]) * wider) - sum(one.bytes for one in inputs if one.needs_grad), 0
    )


def _products(player: Player, op: Any, inputs: list[Value], grad: bool, trains: bool) -> dict[str, Any]:
    gemms = tuple(Gemm(*player.sizes(op, at)) for at in range(len(op["gemms"])))
    if not gemms:  # of scores, a loss reads one in each row
        return {"moved": inputs[-1].bytes} if op["name"] == "nll_loss_forward" else {}
    back = gemms[0].back(inputs[0].needs_grad, trains or not op["weights"]) if grad else ()
    return {"gemms": gemms, "gemms_back": back}


def _width(player: Player, op: Any, traced: int, inputs: Sequence[Value]) -> int:
    """Bytes per element of its output: what is bf16 in the trace has the model's precision, under autocast that of its
    inputs. So has what is fp32 because they were."""
    numbers, name = player.numbers, op["name"]
    widens = all(player.trace.values[number][1] != traced for number in op["in"])
    if traced not in FLOATS or (traced == FP32_BYTES and (widens or not numbers.autocast)):
        return traced
    if not numbers.autocast:
        return numbers.bytes_each
    if name in IN_HALF:
        return HALF_BYTES
    if op["weights"] and name not in PRODUCTS and player.setting.head == IMAGES:  # added to patches, say
        return numbers.bytes_each
    read = inputs[:1] if name in PRODUCTS else inputs
    return max((one.bytes_each for one in read if one.bytes_each in FLOATS), default=numbers.bytes_each)
