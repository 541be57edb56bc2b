"""A model's forward pass, operator by operator, as autograd sees it: what each makes, keeps for the backward pass, and
computes. From one such tape come the memory of a step (`finetune.plan.step`) and its time (`finetune.plan.seconds`).

    tape = Tape(Numbers(bytes_each=2, device="cuda"), {"mlp.up.weight": (4 * width, width)})
    with tape.segment("mlp"):
        y = tape.linear(tape.given(rows * width), "mlp.up")

Each method is an operator of torch's eager mode. What it saves is that operator's formula in torch 2.13
(tools/autograd/derivatives.yaml); tests hold whole models' peaks against measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from finetune.plan.values import FOREVER, FP32_BYTES, HALF_BYTES, Gemm, Lora, Numbers, Op, Segment, Storage, Value

SAVE_OUTPUT = ("relu", "tanh", "sigmoid", "exp", "rsqrt")  # activations whose backward passes read what they made


class Tape:
    """Records. All sizes are in elements unless they say bytes; `shapes` are those of the model's parameters by name.
    With `lora` the model's own weights are frozen; with `inputs_need_grad` embeddings pass gradients on all the same,
    as checkpointing wants it (transformers, modeling_utils.py, enable_input_require_grads)."""

    def __init__(self, numbers: Numbers, shapes: Mapping[str, tuple[int, ...]], lora: Lora | None = None,
                 inputs_need_grad: bool = False) -> None:  # fmt: skip
        self.numbers, self.shapes, self.lora, self.inputs_need_grad = numbers, shapes, lora, inputs_need_grad
        self.trains = lora is None
        self.segments: list[Segment] = []
        self.result: Value | None = None  # the loss, or what a pipeline's stage hands on
        self._count = 0
        self._kept: list[Value] = []
        self.outlasting: dict[Storage, int] = {}  # what a later segment lets go, and the segment that made it
        self._casts: dict[str, Value] = {}  # autocast's cache

    @property
    def ops(self) -> Iterable[Op]:
        return (op for segment in self.segments for op in segment.ops)

    @contextmanager
    def segment(
        self, name: str, *entry: Value, layer: int | None = None, recomputed: bool = False
    ) -> Iterator[Segment]:
        """Operators from here on are those of a new segment, and `entry` lives to its end."""
        part = Segment(name, layer=layer, recomputed=recomputed, entry=entry, start=self._count)
        self.segments.append(part)
        yield part
        self.hold(*entry, *self._kept)
        self._kept = []

    def given(self, elements: int, bytes_each: int | None = None, needs_grad: bool = False) -> Value:
        """A tensor from outside, such as a mask."""
        size = self.numbers.bytes_each if bytes_each is None else bytes_each
        return Value(elements, size, Storage(elements * size), needs_grad)

    def hold(self, *values: Value) -> None:
        """The caller's variables still name these."""
        if values:
            self._add(Op("hold", values, (), kernels=0, kernels_back=0))

    def keep(self, *values: Value) -> None:
        """To the end of the segment a variable names these."""
        self._kept += values

    def keep_to_end(self, *values: Value) -> None:
        """The model's output, or a cache in it, holds these until the loss has been taken from it."""
        for value in values:
            value.storage.last_use = FOREVER
            self.outlasting[value.storage] = len(self.segments) - 1

    def release_casts(self) -> None:
        """Autocast ends, and its cache of weights with it."""
        self.hold(*self._casts.values())

    # The general operator

    def op(
        self,
        name: str,
        inputs: Sequence[Value],
        elements: int,
        *,
        saves: Iterable[Value] = (),
        saves_output: bool = False,
        bytes_each: int | None = None,
        extra_saved: int = 0,
        weights: tuple[str, ...] = (),
        module: str = "",
        passes_on: bool = False,
        narrows: bool = False,
        scratch: int = 0,
        scratch_back: int = 0,
        gemms: tuple[Gemm, ...] = (),
        gemms_back: tuple[Gemm, ...] = (),
        kernels: int = 1,
        kernels_back: int = 1,
        moved: int | None = None,
        moved_back: int | None = None,
        needs_grad: bool | None = None,
    ) -> Value:
        """One output of `elements`, as wide as the first input unless `bytes_each` says otherwise. `extra_saved`: bytes
        of further outputs that only the backward pass reads."""
        if bytes_each is None:
            bytes_each = inputs[0].bytes_each if inputs else self.numbers.bytes_each
        if needs_grad is None:
            needs_grad = any(value.needs_grad for value in inputs) or (bool(weights) and self.trains)
        out = Value(elements, bytes_each, Storage(elements * bytes_each), needs_grad)
        side = [Value(extra_saved, 1, Storage(extra_saved), False)] if extra_saved else []
        kept = [*saves, *([out] if saves_output else []), *side] if needs_grad else []
        if moved is None:
            moved = sum(value.bytes for value in (*inputs, out, *side))
        if moved_back is None:
            moved_back = 2 * moved
        if not needs_grad:
            moved_back = kernels_back = 0
        saved = tuple(value.storage for value in kept)
        self._add(Op(name, tuple(inputs), (out, *side), saved, weights, passes_on, narrows, scratch, scratch_back,
                     gemms, gemms_back, moved, moved_back, kernels, kernels_back, module))  # fmt: skip
        return out

    def _add(self, op: Op) -> None:
        for value in (*op.inputs, *op.outputs):
            if value.storage.last_use < FOREVER:
                value.storage.last_use = self._count
        self.segments[-1].ops.append(op)
        self._count += 1

    # Views

    def alias(self, x: Value, elements: int | None = None, name: str = "view") -> Value:
        """A view whose backward pass makes a new tensor of the size of `x`: a slice, or a transposed one which its
        gradient has another order for."""
        part = Value(x.elements if elements is None else elements, x.bytes_each, x.storage, x.needs_grad)
        self._add(Op(name, (x,), (part,), kernels=0, moved_back=2 * x.bytes))
        return part

    def chunk(self, x: Value, *elements: int) -> list[Value]:
        """Views of parts; the backward pass joins their gradients in one new tensor."""
        parts = [Value(count, x.bytes_each, x.storage, x.needs_grad) for count in elements]
        self._add(Op("chunk", (x,), tuple(parts), kernels=0, moved_back=2 * x.bytes))
        return parts

    # Elementwise

    def add(self, a: Value, b: Value) -> Value:
        size = max(a.bytes_each, b.bytes_each)
        return self.op("add", (a, b), max(a.elements, b.elements), passes_on=True, bytes_each=size)

    def add_in_place(self, a: Value, b: Value) -> Value:
        """a += b."""
        out = Value(a.elements, a.bytes_each, a.storage, a.needs_grad or b.needs_grad)
        self._add(Op("add_", (a, b), (out,), passes_on=True, moved=a.bytes + b.bytes, moved_back=0))
        return out

    def scale(self, x: Value, name: str = "scale") -> Value:
        """Times a number: nothing is kept."""
        return self.op(name, (x,), x.elements)

    def shift(self, x: Value) -> Value:
        """Plus a number: the gradient goes on as it is."""
        return self.op("shift", (x,), x.elements, passes_on=True)

    def multiply(self, a: Value, b: Value) -> Value:
        """A smaller factor's gradient is made as large as the product, then summed."""
        out, size = max(a.elements, b.elements), max(a.bytes_each, b.bytes_each)
        wide = sum(out * size for value in (a, b) if value.needs_grad and value.bytes < out * size)
        return self.op("mul", (a, b), out, saves=_factors(a, b), bytes_each=size, scratch_back=wide)

    def unary(self, name: str, x: Value, scratch_back: int = 0) -> Value:
        """An activation: keeps what it got (gelu, silu, pow), or what it made."""
        makes = name in SAVE_OUTPUT
        return self.op(name, (x,), x.elements, saves=() if makes else (x,), saves_output=makes,
                       scratch_back=scratch_back)  # fmt: skip

    def power(self, x: Value) -> Value:
        """Its gradient is grad * (n * x**(n-1)), with two tensors in between (FunctionsManual.cpp, pow_backward)."""
        return self.unary("pow", x, scratch_back=2 * x.bytes)

    def cast(self, x: Value, bytes_each: int) -> Value:
        """To another precision; to the same one nothing happens."""
        return x if bytes_each == x.bytes_each else self.op("cast", (x,), x.elements, bytes_each=bytes_each)

    def copy(self, x: Value) -> Value:
        """contiguous, or a reshape that cannot be a view."""
        return self.op("copy", (x,), x.elements, passes_on=True)

    def mean(self, x: Value, elements: int) -> Value:
        return self.op("mean", (x,), elements)

    def dropout(self, x: Value, probability: float) -> Value:
        """On a GPU a mask of one byte an element is kept; on a CPU the scaled mask in the input's precision
        (aten/src/ATen/native/Dropout.cpp: native_dropout is CUDA's)."""
        if not probability:
            return x
        mask, kernels = (1, 1) if self.numbers.device == "cuda" else (x.bytes_each, 3)
        return self.op("dropout", (x,), x.elements, extra_saved=mask * x.elements, kernels=kernels)

    # With weights

    def linear(self, x: Value, module: str, tied: str = "", tied_bias: str = "") -> Value:
        """(rows, fan_in) to (rows, fan_out), and what an adapter adds to it. `tied`, `tied_bias`: the parameters that a
        module without its own has. A bias tells the fan-out, also where weights lie turned (GPT-2's Conv1D)."""
        given, size = x, self.numbers.product_bytes
        owned = (f"{module}.weight", tied), (f"{module}.bias", tied_bias)
        weight, bias = (own if own in self.shapes else other for own, other in owned)
        names = (weight, bias) if bias else (weight,)
        fan_out = self.shapes[names[-1]][0]
        fan_in = math.prod(self.shapes[weight]) // fan_out
        rows = x.elements // fan_in
        casts = [self.cast_weight(weight, module)] if self.numbers.autocast else []
        if bias and self.numbers.autocast:  # kept as well, but so small that it is let go here
            casts.insert(0, self.cast_weight(bias, module, keep=False))
        x = self.cast(x, size)
        forward, of_input, of_weight = _products(rows, fan_in, fan_out)
        back = (*([of_input] if x.needs_grad else []), *([of_weight] if self.trains else []))
        saves = [*([x] if self.trains else []), *(casts[-1:] if x.needs_grad else [])]
        out = self.op(
            "linear", (x, *casts), rows * fan_out, saves=saves, gemms=(forward,), gemms_back=back,
            weights=() if casts else names[::-1],  # a bias's comes first: a weight's goes through a transpose
            module="" if casts else module, kernels_back=len(back) + bool(bias),
            moved=x.bytes + (rows + fan_in) * fan_out * size,
        )  # fmt: skip
        if self.lora is None or f"{module}.lora_A.default.weight" not in self.shapes:
            return out
        return self._adapted(self.lora, given, out, module, rows)

    def _adapted(self, lora: Lora, x: Value, base: Value, module: str, rows: int) -> Value:
        """peft, tuners/lora/layer.py, Linear.forward: base + B(A(dropout(x))) * scaling, from `x` in the weights'
        precision."""
        x = self.dropout(self.cast(x, self.numbers.bytes_each), lora.dropout)
        for name in (f"{module}.lora_A.default", f"{module}.lora_B.default"):
            high, wide = self.shapes[f"{name}.weight"]
            casts = [self.cast_weight(f"{name}.weight", name, trains=True)] if self.numbers.autocast else []
            x = self.cast(x, self.numbers.product_bytes)
            forward, of_input, of_weight = _products(rows, wide, high)
            back = (*([of_input] if x.needs_grad else []), of_weight)
            x = self.op("linear", (x, *casts), rows * high, saves=(x, *(casts if x.needs_grad else ())),
                        gemms=(forward,), gemms_back=back, needs_grad=True,
                        weights=() if casts else (f"{name}.weight",), module="" if casts else name)  # fmt: skip
        return self.add(base, self.scale(x))

    def cast_weight(self, name: str, module: str, trains: bool = False, keep: bool = True) -> Value:
        """Autocast's half-precision copy of a weight; a trained one's is kept until autocast ends
        (aten/src/ATen/autocast_mode.cpp, cached_cast)."""
        if name in self._casts:
            return self._casts[name]
        trained, elements = self.trains or trains, math.prod(self.shapes[name])
        made = self.op("cast", (), elements, weights=(name,), module=module, bytes_each=HALF_BYTES, needs_grad=trained,
                       moved=elements * (FP32_BYTES + HALF_BYTES))  # fmt: skip
        if trained and keep:
            self._casts[name] = made
            self.outlasting[made.storage] = len(self.segments) - 1
        return made

    def layer_norm(self, x: Value, module: str) -> Value:
        """Keeps its input, and mean and reciprocal deviation of each row: in fp32 on a GPU, on a CPU as the input is
        (aten/src/ATen/native/layer_norm.cpp)."""
        if self.numbers.autocast and self.numbers.device == "cuda":
            x = self.cast(x, FP32_BYTES)
        names = tuple(name for name in (f"{module}.weight", f"{module}.bias") if name in self.shapes)
        mixed = self.numbers.device == "cuda" or self.numbers.bytes_each == FP32_BYTES
        stats = 2 * (FP32_BYTES if mixed else x.bytes_each) * (x.elements // self.shapes[names[0]][0])
        return self.op("layer_norm", (x,), x.elements, saves=(x,), weights=names, module=module, extra_saved=stats)

    def weigh(self, x: Value, module: str) -> Value:
        """Times a norm's weight, whose gradient is made as large as the product, then summed."""
        size = max(x.bytes_each, self.numbers.bytes_each)
        return self.op("mul", (x,), x.elements, saves=(x,) if self.trains else (), weights=(f"{module}.weight",),
                       module=module, bytes_each=size,
                       scratch_back=x.elements * size if self.trains else 0)  # fmt: skip

    def embedding(self, module: str, rows: int) -> Value:
        elements = rows * self.shapes[f"{module}.weight"][1]
        return self.op("embedding", (), elements, weights=(f"{module}.weight",), module=module,
                       needs_grad=self.trains or self.inputs_need_grad,
                       moved=2 * elements * self.numbers.bytes_each)  # fmt: skip

    # Attention's

    def softmax(self, x: Value) -> Value:
        return self.op("softmax", (x,), x.elements, saves_output=True)

    def matmul(self, a: Value, b: Value, gemm: Gemm, casts: bool = True) -> Value:
        if self.numbers.autocast and casts:
            a, b = self.cast(a, HALF_BYTES), self.cast(b, HALF_BYTES)
        return self.op("matmul", (a, b), gemm.m * gemm.n * gemm.many, saves=_factors(a, b), gemms=(gemm,),
                       gemms_back=gemm.back, kernels_back=2)  # fmt: skip


def _factors(a: Value, b: Value) -> list[Value]:
    """Of a product, what is kept: each factor that the other's gradient needs."""
    return [value for value, other in ((a, b), (b, a)) if other.needs_grad]


def _products(rows: int, fan_in: int, fan_out: int) -> tuple[Gemm, Gemm, Gemm]:
    """A linear layer's: forward, of the gradient of its input, and of that of its weight."""
    return Gemm(rows, fan_out, fan_in), Gemm(rows, fan_in, fan_out), Gemm(fan_out, fan_in, rows)
