"""The tape of a model from what `finetune.measure.tracing` recorded of its modules: operators with their sizes,
what autograd saves of each, and when the last variable lets go of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import mul
from typing import Any

from finetune.plan.families.parts import IMAGES, VECTORS
from finetune.plan.forward.attention import FUSED, Heads, attend, document_mask, kind_of
from finetune.plan.forward.cuts import LINEAR, SOFTMAX, WRITE, Cut, cuts_of, repeated, uses_of
from finetune.plan.forward.expert_parallel import end_of_mixture, expert_parallel, mixture_of
from finetune.plan.forward.losses import chunked_loss, output_in_fp32, vector_loss
from finetune.plan.forward.parts import RNG_STATE_BYTES, Setting, renamed, terms
from finetune.plan.model import MLP, Trace
from finetune.plan.values import ATTENTION, FP32_BYTES, HALF_BYTES, Gemm, Storage, Value

CONVOLUTION = "convolution"
IN_HALF = (*LINEAR, "bmm", "baddbmm", CONVOLUTION)  # under autocast (aten/src/ATen/autocast_mode.h)
PRODUCTS = (*IN_HALF, "_grouped_mm")
TURNS = ("transpose", "permute")
CAST = "_to_copy"
NAMES = {"clone": "copy", CAST: "cast", "_log_softmax": "log_softmax", "_grouped_mm": "grouped_mm",
         "baddbmm": "matmul"}  # fmt: skip
PASSES_ON = ("add", "sub", "clone", "add_", "copy_")
IN_FP32 = ("_log_softmax", "nll_loss_forward")  # likewise


def tape_of_trace(trace: Trace, setting: Setting) -> Value:
    """Records the whole trace on the setting's tape, the middle of many like layers once; returns the result."""
    player, tape, parts = Player(trace, setting), setting.tape, cuts_of(trace)
    alike, segments = repeated(parts, setting), dict[int | None, int]()  # by layer
    for part in parts:
        if old := alike.get(part.layer):
            at = segments[old.layer]
            tape.segments.append(renamed(tape.segments[at], at, old.name, part.name, part.layer or 0))
            player.repeat(old, part)
            continue
        segments[part.layer] = len(tape.segments)
        again = part.layer is not None and setting.recomputes(part.layer)
        entry = (*player.entry(part), *player.masks) if part.layer is not None else ()
        state = (tape.given(RNG_STATE_BYTES, 1),) if again and tape.numbers.device == "cpu" else ()
        with tape.segment(part.name, *entry, *state, layer=part.layer, recomputed=again):
            player.masks = document_mask(setting) if part is parts[0] else player.masks
            skips_to = 0
            for place, (at, op) in enumerate(part.ops):
                if at == player.seen.head and setting.loss_chunk_tokens:
                    return chunked_loss(setting, player.values[op["in"][0]], op["weights"][-1])
                if player.is_expert_parallel(op):
                    skips_to = place + player.play_expert_parallel([one for _, one in part.ops[place:]])
                tape.times = player.times(op)
                if place >= skips_to:
                    player.play(op)
                player.let_go(at)
    for number in trace.kept:
        output_in_fp32(tape, player.values[number])
    tape.release_casts()
    if setting.head == VECTORS:
        with tape.segment("head"):
            return vector_loss(setting, player.values[trace.result])
    return player.values[trace.result]


class Player:
    def __init__(self, trace: Trace, setting: Setting) -> None:
        self.trace, self.setting, self.tape = trace, setting, setting.tape
        self.numbers, self.batch = self.tape.numbers, setting.batch
        self.dropout = 0.5 if self.batch.drops else 0.0  # any probability
        self.values, self.storages = dict[int, Value](), dict[int, Storage]()
        self.whole: dict[int, int] = {}  # bytes per element before a conversion to fp32
        self.in_fp32: dict[int, str] = {}  # weights that a conversion to fp32 does not change
        self.seen = uses_of(trace)
        self.terms = terms(setting.head, self.seen.filled(self.batch))
        self.masks: tuple[Value, ...] = ()  # of all attention without a mask of its own

    def size(self, fitted: Sequence[float]) -> int:
        return max(round(sum(one * term for one, term in zip(fitted, self.terms, strict=True))), 1)

    def times(self, op: Any) -> int:
        """How often it runs in place of iterations that were cut: less than never in a shorter loop."""
        return round(sum(map(mul, op["times"], self.terms))) if "times" in op else 1

    def elements(self, number: int) -> int:
        return self.size(self.trace.values[number][0])

    def value(self, number: int) -> Value:
        if number not in self.values:  # a batch or a buffer: already allocated
            traced = self.trace.values[number][1]
            is_float = traced == HALF_BYTES and (self.setting.head == IMAGES or self.setting.family == MLP)
            size = self.numbers.bytes_each if is_float else traced
            self.put(number, Value(self.elements(number), size, Storage(0), False))
        return self.values[number]

    def put(self, number: int, value: Value) -> None:
        place = self.trace.values[number][2]
        if number in self.seen.held:
            value.storage.bytes, value.storage.copies = value.storage.bytes * value.storage.copies, 1
        self.values[number], self.storages[place] = value, value.storage
        is_last = self.trace.last[place] == len(self.trace.ops)
        if is_last and value.storage.bytes and not self.tape.segments[-1].recomputed:
            self.tape.keep_to_end(value)

    def let_go(self, at: int) -> None:
        """Variables held these storages up to now."""
        if dying := [self.storages[place] for place in self.seen.dying.get(at, ()) if place in self.storages]:
            self.tape.hold(*(Value(0, 1, storage, False) for storage in dying))

    def entry(self, part: Cut) -> tuple[Value, ...]:
        """What a layer reads of earlier ones, its hidden states first."""
        made = {number for _, op in part.ops for number in op["out"]}
        given = dict.fromkeys(number for _, op in part.ops for number in op["in"] if number not in made)
        return tuple(sorted(map(self.value, given), key=lambda value: not value.needs_grad))

    def repeat(self, old: Cut, new: Cut) -> None:
        """What later layers read of a layer that is not played is what its like has made."""
        value, place = (to - since for to, since in zip(new.first, old.first, strict=True))
        for _, op in old.ops:
            for number in self.values.keys() & op["out"]:
                self.values[number + value] = self.values[number]
                old_place = self.trace.values[number][2]
                if old_place >= old.first[1]:  # not of a view of what was there before
                    self.storages[old_place + place] = self.values[number].storage

    def play(self, op: Any) -> None:
        if names := [self.in_fp32[number] for number in op["in"] if number in self.in_fp32]:
            op = {**op, "in": [one for one in op["in"] if one not in self.in_fp32], "weights": names}
        name, inputs, weights = op["name"], [self.value(number) for number in op["in"]], op["weights"]
        if name == WRITE and (base := self.seen.written.get(op["out"][0])) is not None:
            self.put(base, self.tape.write(self.value(base), inputs[1]))
            return
        is_idle = self.seen.idle.issuperset(op["out"])
        if is_idle or name.startswith("new_") or name.endswith("_like"):  # only sizes are read
            weights = [] if op["inside"] and inputs else weights  # without gradients
            op = {**op, "weights": weights if inputs else []}  # or converted for nothing
            inputs = [replace(one, needs_grad=False) for one in inputs]
        whole = max((self.whole.get(number, 0) for number in op["in"]), default=0)
        first = op["out"][0]
        widens = name == CAST and self.trace.values[first][1] == FP32_BYTES
        is_same = widens and bool(weights) and self.tape.bytes_of(weights[0]) == FP32_BYTES
        if is_same or (names and not inputs and (op["part"] or name in TURNS)):
            self.in_fp32 |= dict.fromkeys(op["out"], weights[0])
            return
        if len(op["out"]) > 1 and op["part"]:
            parts = self.tape.chunk(inputs[0], *map(self.elements, op["out"]))
            for number, part in zip(op["out"], parts, strict=True):
                self.put(number, part)
            return
        if weights and inputs:
            out = self.weighed(op, inputs[0])
        elif name in TURNS:
            out = self.tape.alias(inputs[0]) if first in self.seen.sliced or self.copies_back(op) else inputs[0]
        elif op["part"]:
            out = self.tape.alias(inputs[0], self.elements(first), name)
        elif name == CAST and inputs:
            out, whole = self.converted(first, inputs[0], whole)
        else:  # what runs within an operator of its own saves nothing by itself
            out = self.plain(op, inputs) if inputs and not (op["inside"] and self.trace.values[first][3]) else None
        is_known = out is not None
        out = out or self.any_other(op, inputs)
        if is_known or is_idle:
            self.save_beside(op)
        self.put(first, out)
        if whole:
            self.whole[first] = whole

    def is_expert_parallel(self, op: Any) -> bool:
        """Whether it is the router of experts that ranks hold together."""
        return bool(op["weights"]) and f"{mixture_of(op)}.experts.w1" in self.tape.shapes

    def play_expert_parallel(self, ops: Sequence[Any]) -> int:
        """Plays a mixture in expert parallelism in place of the first of `ops`; returns of how many."""
        x = ops[0]["in"][0]
        count, made = end_of_mixture(ops, x, lambda number: self.trace.values[number][2])
        self.put(made, expert_parallel(self.setting, mixture_of(ops[0]), self.values[x]))
        return count

    def save_beside(self, op: Any) -> None:
        """What an operator of the model's own has saved is recorded with the one that follows it."""
        own = {self.trace.values[number][2] for number in (*op["in"], *op["out"])}
        if beside := [self.storages[one] for one in op["saved"] if one in self.storages and one not in own]:
            self.tape.op("save", (), 1, saves=[Value(0, 1, one) for one in beside], kernels=0, needs_grad=True)

    def weighed(self, op: Any, x: Value) -> Value | None:
        """Operators with parameters."""
        name, weights = op["name"], op["weights"]
        module = weights[-1].rpartition(".")[0]
        if name in LINEAR:
            fan_out = self.size(op["gemms"][0][1])
            return self.tape.linear(x, module, weights[-1], weights[0] if len(weights) > 1 else "", fan_out)
        if name == "native_layer_norm" and len(op["in"]) == 1:
            return self.tape.layer_norm(x, module)
        return self.tape.weigh(x, module) if name == "mul" and weights[-1] == f"{module}.weight" else None

    def plain(self, op: Any, inputs: list[Value]) -> Value | None:
        """Operators without parameters whose backward pass is known better than what autograd saves."""
        tape, name = self.tape, op["name"]
        if name == "dropout":
            return tape.dropout(inputs[0], self.dropout)
        if name == ATTENTION:
            return attend(self.setting, self.heads(op), *inputs, *(self.masks if len(inputs) == len("qkv") else ()))
        if name == "mul" and len(inputs) > 1:
            return tape.multiply(inputs[0], inputs[1], self.elements(op["out"][0]))
        if name == "bmm":
            gemm = Gemm(*map(self.size, op["gemms"][0]))
            return tape.matmul(inputs[0], inputs[1], gemm, casts=not op["inside"])  # positions are turned in fp32
        if name == "pow":
            return tape.power(inputs[0])
        if name == SOFTMAX:
            full = FP32_BYTES if self.trace.values[op["out"][0]][1] == FP32_BYTES else None
            widens = self.numbers.autocast and self.numbers.device == "cuda" and not (full and self.numbers.is_fp16)
            return tape.softmax(tape.cast(inputs[0], FP32_BYTES) if widens else inputs[0], full)
        return None

    def converted(self, number: int, x: Value, whole: int) -> tuple[Value, int]:
        """The trace is in bf16: what it converts from fp32 goes back to the precision that it had. On a GPU one kernel
        reads fp16 and writes a softmax in fp32 (aten/src/ATen/native/SoftMax.cpp)."""
        size = self.trace.values[number][1]
        is_float = x.bytes_each in (HALF_BYTES, FP32_BYTES)
        if size == FP32_BYTES:
            joined = number in self.seen.in_softmax and self.numbers.is_fp16 and self.numbers.device == "cuda"
            return (x if joined else self.tape.cast(x, size)), whole or x.bytes_each * is_float
        if size != HALF_BYTES:
            return self.tape.op("cast", (x,), x.elements, bytes_each=size, needs_grad=False), 0
        back = whole if self.numbers.autocast and whole else self.numbers.bytes_each
        return self.tape.cast(x, back), 0

    def copies_back(self, op: Any) -> bool:
        """Whether the gradient of a transposed value has another layout. Fused attention's has not."""
        reader = self.seen.attentions.get(op["out"][0])
        if reader is None:
            return not self.seen.attentions
        is_given = len(reader["in"]) > len("qkv")
        trains = is_given and bool(self.trace.values[reader["in"][-1]][3])
        return kind_of(self.tape, self.heads(reader), is_given or bool(self.masks), trains) != FUSED

    def heads(self, op: Any) -> Heads:
        tokens, keys, width, many = map(self.size, op["gemms"][0])
        query, key = map(self.elements, op["in"][:2])
        heads, values = many // self.batch.rows, self.size(op["gemms"][1][1])
        how = {**op["heads"], "dropout": op["heads"]["dropout"] and self.dropout}
        return Heads(replace(self.batch, tokens=tokens), heads, width, heads * key * tokens // (query * keys),
                     keys=keys, value_width=values, **how)  # fmt: skip

    def any_other(self, op: Any, inputs: list[Value]) -> Value:
        """Saves what autograd saves, if it is still needed."""
        tape, name, weights = self.tape, op["name"], op["weights"]
        first, *others = op["out"]
        _, traced, place, grad = self.trace.values[first]
        saved = [Value(0, 1, self.storages[one]) for one in dict.fromkeys(op["saved"]) if one in self.storages]
        if inputs and place == self.trace.values[op["in"][0]][2]:
            return tape.add_in_place(inputs[0], inputs[-1], saved)
        if self.numbers.autocast and name in IN_FP32:
            inputs = [tape.cast(one, FP32_BYTES) if one.bytes_each == HALF_BYTES else one for one in inputs]
        if self.numbers.autocast and name in IN_HALF:
            inputs = [tape.cast(one, HALF_BYTES) for one in inputs]
        if name == "_grouped_mm" and weights:  # to its weights' (transformers 5.23, integrations/moe.py, _grouped_mm)
            inputs = [tape.cast(inputs[0], tape.bytes_of(weights[0])), *inputs[1:]]
        module = weights[-1].rpartition(".")[0] if weights else ""
        is_leaf = name == "embedding" and tape.makes_leaf(module)
        trains = any(map(tape.trains, weights))
        grad = bool(grad) and (trains or is_leaf or any(one.needs_grad for one in inputs))
        kept = [number for number in others if self.trace.values[number][2] in op["saved"]]
        out = tape.op(
            NAMES.get(name, name), inputs, self.elements(first), **self.products(op, inputs, grad, trains),
            saves=() if weights and not trains and name in PRODUCTS else saved,
            saves_output=is_leaf or place in op["saved"], bytes_each=self.width(op, traced, inputs),
            extra_saved=sum(self.elements(one) * self.trace.values[one][1] for one in kept), needs_grad=grad,
            weights=tuple(weights[::-1]), module=module, passes_on=name in PASSES_ON, narrows=name in ("cat", "stack"),
        )  # fmt: skip
        beside = tape.segments[-1].ops[-1].outputs
        for number in others:
            self.put(number, Value(self.elements(number), self.trace.values[number][1], beside[-1].storage, False))
        return out

    def products(self, op: Any, inputs: list[Value], grad: bool, trains: bool) -> dict[str, Any]:
        gemms = tuple(Gemm(*map(self.size, gemm)) for gemm in op["gemms"])
        if not gemms:  # of scores, a loss reads one in each row
            return {"moved": inputs[-1].bytes} if op["name"] == "nll_loss_forward" else {}
        of_input, of_other = gemms[0].back
        back = (*([of_input] if inputs[0].needs_grad else []), *([of_other] if trains or not op["weights"] else []))
        return {"gemms": gemms, "gemms_back": back if grad else ()}

    def width(self, op: Any, traced: int, inputs: Sequence[Value]) -> int:
        """Bytes per element of its output: what is bf16 in the trace has the model's precision, under autocast that of
        its inputs. So has what is fp32 because they were."""
        widens = all(self.trace.values[number][1] != traced for number in op["in"])
        if traced not in (HALF_BYTES, FP32_BYTES) or (traced == FP32_BYTES and (widens or not self.numbers.autocast)):
            return traced
        if not self.numbers.autocast:
            return self.numbers.bytes_each
        name = op["name"]
        if name in IN_HALF:
            return HALF_BYTES
        if op["weights"] and name not in PRODUCTS and self.setting.head == IMAGES:  # added to patches, say
            return self.numbers.bytes_each
        read = inputs[:1] if name in PRODUCTS else inputs
        floats = [one.bytes_each for one in read if one.bytes_each in (HALF_BYTES, FP32_BYTES)]
        return max(floats, default=self.numbers.bytes_each)
