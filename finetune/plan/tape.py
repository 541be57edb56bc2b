"""A model's forward pass, operator by operator, as autograd sees it: what each makes, saves for the backward pass, and
computes. A tape gives the memory of a step (`finetune.plan.step`) and its time (`finetune.plan.seconds`).

    tape = Tape(Numbers(bytes_each=2, device="cuda"), {"mlp.up.weight": (4 * width, width)})
    with tape.segment("mlp"):
        y = tape.linear(tape.given(rows * width), "mlp.up")

Each method is an operator of torch's eager mode. What it saves follows torch 2.13
(tools/autograd/derivatives.yaml); tests compare whole models' peaks with measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from finetune.plan.recorder import Recorder
from finetune.plan.values import FP32_BYTES, HALF_BYTES, Gemm, Lora, Op, Value

WHOLE_IN_DORA = 4  # tensors as large as the layer's weight: product, scaled, base and sum


class Tape(Recorder):
    """Operators by name."""

    # Elementwise

    def add(self, a: Value, b: Value) -> Value:
        size = max(a.bytes_each, b.bytes_each)
        return self.op("add", (a, b), max(a.elements, b.elements), passes_on=True, bytes_each=size)

    def add_in_place(self, a: Value, b: Value, saves: Iterable[Value] = ()) -> Value:
        """`saves`: of another operator, such as a division."""
        out = Value(a.elements, a.bytes_each, a.storage, a.needs_grad or b.needs_grad)
        saved = tuple(one.storage for one in saves) if out.needs_grad else ()
        self._add(Op("add_", (a, b), (out,), saved, passes_on=True, moved=a.bytes + b.bytes, moved_back=0))
        return out

    def write(self, whole: Value, part: Value) -> Value:
        """`whole`, with a part of it overwritten. The backward pass copies the whole gradient, and the part's out of it
        (torch/csrc/autograd/functions/tensor.cpp, CopySlices)."""
        out = Value(whole.elements, whole.bytes_each, whole.storage, whole.needs_grad or part.needs_grad)
        scratch = 0 if whole.needs_grad else whole.bytes
        self._add(Op("copy_", (whole, part), (out,), scratch_back=scratch, moved=2 * part.bytes, kernels_back=4,
                     moved_back=2 * (whole.bytes + 2 * part.bytes)))  # fmt: skip
        return out

    def scale(self, x: Value) -> Value:
        """Times a number: nothing is saved."""
        return self.op("scale", (x,), x.elements)

    def multiply(self, a: Value, b: Value, elements: int = 0) -> Value:
        """A smaller factor's gradient is made as large as the product, then summed. `elements`: of a product larger
        than both."""
        out, size = max(a.elements, b.elements, elements), max(a.bytes_each, b.bytes_each)
        wide = sum(out * size for value in (a, b) if value.needs_grad and value.bytes < out * size)
        return self.op("mul", (a, b), out, saves=_factors(a, b), bytes_each=size, scratch_back=wide)

    def unary(self, name: str, x: Value, scratch_back: int = 0) -> Value:
        """An activation: saves its input or, ReLU, its output."""
        makes = name == "relu"
        return self.op(name, (x,), x.elements, saves=() if makes else (x,), saves_output=makes,
                       scratch_back=scratch_back)  # fmt: skip

    def cast(self, x: Value, bytes_each: int) -> Value:
        """To another precision; a no-op for the same one."""
        return x if bytes_each == x.bytes_each else self.op("cast", (x,), x.elements, bytes_each=bytes_each)

    def copy(self, x: Value) -> Value:
        """contiguous, or a reshape that cannot be a view."""
        return self.op("copy", (x,), x.elements, passes_on=True)

    def dropout(self, x: Value, probability: float) -> Value:
        """On a GPU a mask of one byte per element is saved; on a CPU the scaled mask in the input's precision
        (aten/src/ATen/native/Dropout.cpp: native_dropout is CUDA's)."""
        if not probability:
            return x
        mask, kernels = (1, 1) if self.numbers.device == "cuda" else (x.bytes_each, 3)
        return self.op("dropout", (x,), x.elements, extra_saved=mask * x.elements, kernels=kernels)

    # With weights

    def linear(self, x: Value, module: str, tied: str = "", tied_bias: str = "", fan_out: int = 0) -> Value:
        """(rows, fan_in) to (rows, fan_out), and what an adapter adds to it. `tied`, `tied_bias`: the parameters of a
        module without its own. `fan_out`: if the weight may be transposed (GPT-2's Conv1D); 0: its first side."""
        given = x
        owned = (f"{module}.weight", tied), (f"{module}.bias", tied_bias)
        weight, bias = (own if own in self.shapes else other for own, other in owned)
        names = (weight, bias) if bias else (weight,)
        fan_out = fan_out if fan_out in self.shapes[weight] else self.shapes[weight][0]
        fan_in = math.prod(self.shapes[weight]) // fan_out
        rows = x.elements // fan_in
        is_packed = weight in self.packed
        trains, casts = self.trains(weight), [self.cast_weight(weight, module)] if self.casts(weight) else []
        if bias and casts:  # cached too, but so small that it is freed here
            casts.insert(0, self.cast_weight(bias, module, keep=False))
        # bitsandbytes unpacks a weight for each product, which is in bf16 (nn/modules.py, Linear4bit.forward).
        size = HALF_BYTES if is_packed else self.numbers.product_bytes
        unpacked = fan_in * fan_out * size if is_packed else 0
        packed = fan_in * fan_out // 2 if is_packed else 0
        x = self.cast(x, size)
        product = Gemm(rows, fan_out, fan_in)
        back = product.back(x.needs_grad, trains)
        is_saved = trains or (self.numbers.saves_inputs and x.needs_grad)
        saves = [*([x] if is_saved else []), *(casts[-1:] if x.needs_grad else [])]
        out = self.op(
            "linear", (x, *casts), rows * fan_out, saves=saves, gemms=(product,), gemms_back=back,
            weights=() if casts else names[::-1],  # a bias's gradient comes first: a weight's passes a transpose
            module="" if casts else module, kernels_back=len(back) + bool(bias),
            moved=x.bytes + (rows + fan_in) * fan_out * size, moved_ahead=packed + unpacked,
            scratch=unpacked, scratch_back=unpacked,
        )  # fmt: skip
        out = self.cast(out, given.bytes_each) if is_packed else out
        if self.lora is None or f"{module}.lora_A.default.weight" not in self.shapes:
            return out
        return self._adapted(self.lora, given, out, module, rows)

    def _adapted(self, lora: Lora, x: Value, base: Value, module: str, rows: int) -> Value:
        """peft, tuners/lora/layer.py, Linear.forward: base + B(A(dropout(x))) * scaling, from `x` in the precision of
        the adapter's weights, which autocast finds in fp32, unless FSDP has gathered them in half precision."""
        own = self.bytes_of(f"{module}.lora_A.default.weight")
        x = self.dropout(self.cast(x, own), lora.dropout)
        for part in (f"{module}.lora_A.default", f"{module}.lora_B.default"):
            x = self.product("linear", x, part, Gemm(rows, *self.shapes[f"{part}.weight"]))
        if lora.is_dora:
            return self._dora(base, x, module, own)
        return self.add(base, self.scale(x))

    def product(self, name: str, x: Value, module: str, gemm: Gemm) -> Value:
        """Of `x` and the trained weight of `module`, which has no bias."""
        weight = f"{module}.weight"
        casts = [self.cast_weight(weight, module)] if self.casts(weight) else []
        x = self.cast(x, self.numbers.product_bytes)
        return self.op(name, (x, *casts), gemm.m * gemm.n, saves=(x, *(casts if x.needs_grad else ())), gemms=(gemm,),
                       gemms_back=gemm.back(x.needs_grad), weights=() if casts else (weight,),
                       module="" if casts else module)  # fmt: skip

    def _dora(self, base: Value, x: Value, module: str, own: int) -> Value:
        """peft, tuners/lora/dora.py, DoraLinearLayer.forward: scales both products by row norms, for which it builds
        the adapter's whole weight, from an identity matrix, and the base's beside it."""
        name, rows_of = f"{module}.lora_magnitude_vector.default", (base, x)
        high = math.prod(self.shapes[f"{name}.weight"])
        wide = self.shapes[f"{module}.lora_A.default.weight"][1]
        made = (wide * wide + WHOLE_IN_DORA * wide * high) * own
        parts = [
            self.op("mul", (part,), part.elements, saves=(part,), weights=(f"{name}.weight",), module=name,
                    bytes_each=own, scratch=made if part is base else 0, scratch_back=part.elements * own)
            for part in rows_of
        ]  # fmt: skip
        return self.cast(self.add(base, self.add(parts[0], self.scale(parts[1]))), base.bytes_each)

    def cast_weight(self, name: str, module: str, keep: bool = True) -> Value:
        """Autocast's half-precision copy of a weight; a trained weight's is cached until autocast ends
        (aten/src/ATen/autocast_mode.cpp, cached_cast)."""
        if name in self._casts:
            return self._casts[name]
        elements = math.prod(self.shapes[name])
        made = self.op("cast", (), elements, weights=(name,), module=module, bytes_each=HALF_BYTES,
                       moved=elements * (FP32_BYTES + HALF_BYTES))  # fmt: skip
        if self.trains(name) and keep:
            self._casts[name] = made
            self.outlasting[made.storage] = len(self.segments) - 1
        return made

    def layer_norm(self, x: Value, module: str, scratch: int = 0) -> Value:
        """Saves its input, and each row's mean and reciprocal deviation: in fp32 on a GPU, on a CPU like the input
        (aten/src/ATen/native/layer_norm.cpp)."""
        if self.numbers.autocast and self.numbers.device == "cuda":
            x = self.cast(x, FP32_BYTES)
        names = tuple(name for name in (f"{module}.weight", f"{module}.bias") if name in self.shapes)
        mixed = self.numbers.device == "cuda" or self.numbers.bytes_each == FP32_BYTES
        stats = 2 * (FP32_BYTES if mixed else x.bytes_each) * (x.elements // self.shapes[names[0]][0])
        return self.op("layer_norm", (x,), x.elements, saves=(x,), weights=names, module=module, extra_saved=stats,
                       scratch=scratch)  # fmt: skip

    def weigh(self, x: Value, module: str) -> Value:
        """Times a norm's weight, whose gradient is made as large as the product, then summed."""
        size, trains = max(x.bytes_each, self.numbers.bytes_each), self.trains(f"{module}.weight")
        return self.op("mul", (x,), x.elements, saves=(x,) if trains else (), weights=(f"{module}.weight",),
                       module=module, bytes_each=size, scratch_back=x.elements * size if trains else 0)  # fmt: skip

    # Attention

    def softmax(self, x: Value, bytes_each: int | None = None, is_safe: bool = False) -> Value:
        """On a GPU the backward pass first makes the product of gradient and output
        (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out). A safe one looks for scores that are all
        masked, with a byte per score (aten/src/ATen/native/SoftMax.cpp, _safe_softmax)."""
        size = x.bytes_each if bytes_each is None else bytes_each
        product = x.elements * size if self.numbers.device == "cuda" else 0
        return self.op("softmax", (x,), x.elements, saves_output=True, bytes_each=size, scratch_back=product,
                       scratch=x.elements if is_safe else 0)  # fmt: skip

    def matmul(self, a: Value, b: Value, gemm: Gemm, casts: bool = True) -> Value:
        if self.numbers.autocast and casts:
            a, b = self.cast(a, HALF_BYTES), self.cast(b, HALF_BYTES)
        return self.op("matmul", (a, b), gemm.m * gemm.n * gemm.many, saves=_factors(a, b), gemms=(gemm,),
                       gemms_back=gemm.back(), kernels_back=2)  # fmt: skip


def _factors(a: Value, b: Value) -> list[Value]:
    """The factors of a product that are saved: each that the other's gradient needs."""
    return [value for value, other in ((a, b), (b, a)) if other.needs_grad]
