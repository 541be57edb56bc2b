"""The tape of a model outside the known families, from what `finetune.measure.tracing` recorded of its modules.
An operator's name tells what autograd does with it; unknown operators make gradients as large as their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from finetune.plan.families.parts import Sizes
from finetune.plan.forward.attention import FUSED, Heads, attend, kind_of
from finetune.plan.forward.parts import Batch, Setting
from finetune.plan.model import Trace
from finetune.plan.tape import Tape
from finetune.plan.values import ATTENTION, FLASH_ATTENTION_2, FP32_BYTES, HALF_BYTES, Gemm, Op, Storage, Value

LINEAR = {"mm", "addmm"}
PRODUCTS = {*LINEAR, "bmm", "baddbmm"}
NAMES = {"_to_copy": "cast", "clone": "copy", "native_layer_norm": "layer_norm", "_softmax": "softmax",
         "_log_softmax": "log_softmax", **dict.fromkeys(LINEAR, "linear"), "bmm": "matmul",
         "baddbmm": "matmul"}  # fmt: skip
PASSES_ON = {"add", "clone", "add_"}
IN_FP32 = {"native_layer_norm", "_log_softmax", "_softmax"}  # under autocast on a GPU (aten/src/ATen/autocast_mode.h)
TWICE = 2  # intermediate tensors of pow's gradient (FunctionsManual.cpp, pow_backward)


def tape_of_trace(trace: Trace, tape: Tape, batch: Batch, interval: int) -> None:
    """Puts the whole trace on `tape`. `interval`: layers checkpointed together; 0: none."""
    player = _Player(trace, tape, batch)
    for segment, ops in groupby(trace.ops, key=lambda op: op["segment"]):
        is_layer = 0 < segment <= trace.layers
        made = list(ops)
        entry = player.entry(made) if is_layer else ()
        layer = segment - 1 if is_layer else None
        name = f"layer {layer}" if is_layer else "embedding" if not segment else "head"
        with tape.segment(name, *entry, layer=layer, recomputed=is_layer and bool(interval)):
            for op in made:
                player.play(op)
    tape.result = player.values[trace.ops[-1]["out"][0]]
    logits = [op["out"][0] for op in trace.ops if op["name"] in PRODUCTS][-1]
    tape.keep_to_end(player.values[logits])
    tape.release_casts()


class _Player:
    def __init__(self, trace: Trace, tape: Tape, batch: Batch) -> None:
        self.trace, self.tape, self.numbers, self.batch = trace, tape, tape.numbers, batch
        rows, tokens = batch.rows, batch.tokens
        self.terms = (1, tokens, rows, rows * tokens, rows * tokens * tokens)
        self.values: dict[int, Value] = {}
        self.storages: dict[int, Storage] = {}

    def size(self, fitted: Sequence[float]) -> int:
        return max(round(sum(one * term for one, term in zip(fitted, self.terms, strict=True))), 1)

    def value(self, number: int) -> Value:
        if number not in self.values:
            elements, width, place, _ = self.trace.values[number]
            self.values[number] = self.tape.given(self.size(elements), width)
            self.storages[place] = self.values[number].storage
        return self.values[number]

    def entry(self, ops: Sequence[Any]) -> tuple[Value, ...]:
        """A layer's inputs from earlier layers that need a gradient."""
        made = {number for op in ops for number in op["out"]}
        given = {number: None for op in ops for number in op["in"] if number not in made and number in self.values}
        return tuple(self.values[number] for number in given if self.values[number].needs_grad)

    def play(self, op: Any) -> None:
        name, numbers = op["name"], self.numbers
        inputs = [self.value(number) for number in op["in"]]
        if name == ATTENTION and kind_of(self.tape, heads := self.heads(op, inputs)) != FUSED:
            setting = Setting(self.tape, Sizes({}, ""), self.batch)
            self.renamed(op["out"][0], attend(setting, heads, *inputs))
            return
        weights = tuple(op["weights"])
        module = weights[0].rpartition(".")[0] if weights else ""
        if numbers.autocast and name in (*PRODUCTS, ATTENTION):
            inputs = [self.tape.cast(one, HALF_BYTES) for one in inputs]
            if weights:
                inputs += [self.tape.cast_weight(weights[-1], module)]
                weights, module = (), ""
        if numbers.autocast and numbers.device == "cuda" and name in IN_FP32:
            inputs = [self.tape.cast(one, FP32_BYTES) if one.bytes_each < FP32_BYTES else one for one in inputs]
        outs = [self.made(number, name, inputs, op["part"]) for number in op["out"]]
        if name == "_to_copy" and inputs and outs[0].bytes_each == inputs[0].bytes_each and not op["part"]:
            self.renamed(op["out"][0], inputs[0])
            return
        self.add(op, name, tuple(inputs), tuple(outs), weights, module)

    def heads(self, op: Any, inputs: Sequence[Value]) -> Heads:
        tokens, looked_at, width, many = map(self.size, op["gemms"][0])
        heads = many // self.batch.rows
        pairs = heads * inputs[1].elements // inputs[0].elements
        return Heads(self.batch, heads, width, pairs, causal=looked_at < tokens)

    def made(self, number: int, name: str, inputs: Sequence[Value], is_part: bool) -> Value:
        fitted, width, place, grad = self.trace.values[number]
        elements = self.size(fitted)
        storage = inputs[0].storage if is_part else self.storages.get(place)
        bytes_each = inputs[0].bytes_each if is_part else self.width(width, name, inputs)
        if storage is None:
            storage = self.storages[place] = Storage(elements * bytes_each)
        self.values[number] = Value(elements, bytes_each, storage, bool(grad))
        return self.values[number]

    def width(self, traced: int, name: str, inputs: Sequence[Value]) -> int:
        """Bytes per element. The trace is in bf16, which becomes the model's precision, under autocast its inputs'."""
        if traced != HALF_BYTES:
            return traced
        if not self.numbers.autocast:
            return self.numbers.bytes_each
        if name in (*PRODUCTS, ATTENTION):
            return HALF_BYTES
        floats = [one.bytes_each for one in inputs if one.bytes_each in (HALF_BYTES, FP32_BYTES)]
        return max(floats, default=FP32_BYTES)

    def renamed(self, number: int, given: Value) -> None:
        self.values[number] = given
        self.storages[self.trace.values[number][2]] = given.storage

    def add(
        self,
        op: Any,
        name: str,
        inputs: tuple[Value, ...],
        outs: tuple[Value, ...],
        weights: tuple[str, ...],
        module: str,
    ) -> None:
        grad = any(one.needs_grad for one in outs)
        gemms = tuple(Gemm(*map(self.size, gemm)) for gemm in op["gemms"])
        places = dict.fromkeys(place for place in op["saved"] if place in self.storages)
        saved = tuple(dict.fromkeys(self.storages[place] for place in places)) if grad else ()
        if self.numbers.autocast and name in (*PRODUCTS, ATTENTION) and grad:
            saved = (*(one.storage for one in inputs), *(one.storage for one in outs if name == ATTENTION))
        moved = sum(one.bytes for one in (*inputs, *outs))
        moved += sum(self.numbers.bytes_each * _elements(self.tape.shapes[one]) for one in weights)
        back = self.backward(name, gemms, inputs, weights) if grad else ()
        called = NAMES.get(name, name)
        if called == ATTENTION and self.numbers.attention == FLASH_ATTENTION_2:
            called = FLASH_ATTENTION_2
        kernels = 0 if op["part"] else 1
        self.tape._add(
            Op(called, inputs, outs, saved, weights[::-1], name in PASSES_ON, name == "cat",
               scratch_back=self.between(name, inputs, outs, weights) if grad else 0, gemms=gemms, gemms_back=back,
               moved=moved * kernels, moved_back=2 * moved if grad else 0, kernels=kernels,
               kernels_back=max(len(back), 1) if grad else 0, module=module)
        )  # fmt: skip

    def backward(
        self, name: str, gemms: tuple[Gemm, ...], inputs: tuple[Value, ...], weights: tuple[str, ...]
    ) -> tuple[Gemm, ...]:
        if not gemms:
            return ()
        if name == ATTENTION:
            first, second = gemms
            return first, first, first, second, second
        of_input, of_other = gemms[0].back
        return (*([of_input] if inputs and inputs[0].needs_grad else []), of_other)

    def between(self, name: str, inputs: tuple[Value, ...], outs: tuple[Value, ...], weights: tuple[str, ...]) -> int:
        """Scratch bytes of the backward pass, by operator as in `finetune.plan.tape`."""
        size = outs[0].bytes
        if name == "pow":
            return TWICE * size
        if name == "mul":
            return size * (bool(weights) + sum(one.needs_grad and one.bytes < size for one in inputs))
        return size if name == "_softmax" and self.numbers.device == "cuda" else 0


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found
