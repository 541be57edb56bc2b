"""Records a tape: segments, operators, views of tensors. `finetune.plan.tape` has the named operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from finetune.plan.values import FOREVER, FP32_BYTES, Gemm, Lora, Numbers, Op, Segment, Storage, Value


class Recorder:
    """All sizes are in elements unless they say bytes; `shapes`: of the model's parameters by name. With `lora` the
    model's own weights are frozen, `packed` ones in 4 bits. With `inputs_need_grad` the input embeddings, which are the
    first, still pass gradients on, as checkpointing needs (modeling_utils.py, enable_input_require_grads)."""

    def __init__(self, numbers: Numbers, shapes: Mapping[str, tuple[int, ...]], lora: Lora | None = None,
                 packed: frozenset[str] = frozenset(), inputs_need_grad: bool = False) -> None:  # fmt: skip
        self.numbers, self.shapes, self.lora, self.inputs_need_grad = numbers, shapes, lora, inputs_need_grad
        self.packed = packed
        self.segments: list[Segment] = []
        self.result: Value | None = None  # the loss, or a pipeline stage's output
        self._count = 0
        self._kept: list[Value] = []
        self.outlasting: dict[Storage, int] = {}  # storages freed by a later segment, and the segment that made them
        self._casts: dict[str, Value] = {}  # autocast's cache
        self._embeddings = ""  # the module of the input embeddings
        self.offloads = False  # what recomputed segments save lies on the host
        self.times = 1  # how often each operator from here on runs

    def trains(self, weight: str) -> bool:
        return self.lora is None or ".lora_" in weight or self.lora.saves(weight.rpartition(".")[0])

    def makes_leaf(self, module: str) -> bool:
        """Whether the output of this embedding is made a leaf that needs a gradient; autograd holds a leaf until its
        gradient has come."""
        self._embeddings = self._embeddings or module
        return self.inputs_need_grad and module == self._embeddings and not self.trains(f"{module}.weight")

    def casts(self, weight: str) -> bool:
        """Whether each product casts the weight: under autocast, if it is not in half precision already."""
        numbers = self.numbers
        is_half = numbers.bytes_each < FP32_BYTES and (numbers.half_weights or not self.trains(weight))
        return numbers.autocast and not is_half and weight not in self.packed

    def bytes_of(self, weight: str) -> int:
        """Per element."""
        return FP32_BYTES if self.casts(weight) else self.numbers.bytes_each

    @property
    def ops(self) -> Iterable[Op]:
        return (op for segment in self.segments for op in segment.ops)

    @contextmanager
    def segment(self, name: str, *entry: Value, recomputed: bool = False) -> Iterator[None]:
        """Operators from here on belong to a new segment, and `entry` lives to its end."""
        self.segments.append(Segment(name, recomputed=recomputed, entry=entry, start=self._count))
        yield
        self.hold(*entry, *self._kept)
        self._kept = []

    def given(self, elements: int, bytes_each: int | None = None, needs_grad: bool = False) -> Value:
        """A tensor from outside, such as a mask."""
        size = self.numbers.bytes_each if bytes_each is None else bytes_each
        return Value(elements, size, Storage(elements * size), needs_grad)

    def hold(self, *values: Value) -> None:
        """The caller's variables still hold these."""
        if values:
            self._add(Op("hold", values, (), kernels=0, kernels_back=0))

    def keep(self, *values: Value) -> None:
        """A variable holds these to the end of the segment."""
        self._kept += values

    def keep_to_end(self, value: Value) -> None:
        """The model's output, or a cache in it, holds this until the loss is read from it."""
        value.storage.last_use = FOREVER
        self.outlasting[value.storage] = len(self.segments) - 1

    def release_casts(self) -> None:
        """Autocast ends, and with it its cache of weights."""
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
        moved_ahead: int = 0,
        needs_grad: bool | None = None,
    ) -> Value:
        """One output of `elements`, as wide as the first input unless `bytes_each` says otherwise. `extra_saved`: bytes
        of further outputs that only the backward pass reads."""
        if bytes_each is None:
            bytes_each = inputs[0].bytes_each if inputs else self.numbers.bytes_each
        if needs_grad is None:
            needs_grad = any(value.needs_grad for value in inputs) or any(map(self.trains, weights))
        out = Value(elements, bytes_each, Storage(elements * bytes_each), needs_grad)
        side = [Value(extra_saved, 1, Storage(extra_saved), False)] if extra_saved else []
        kept = [*saves, *([out] if saves_output else []), *side] if needs_grad else []
        if moved is None:
            moved = sum(value.bytes for value in (*inputs, out, *side))
        if moved_back is None:
            moved_back = 2 * moved if kept else moved  # of a gradient and what was saved, or of a gradient alone
        if not needs_grad:
            moved_back = kernels_back = 0
        saved = tuple(value.storage for value in kept)
        self._add(Op(name, tuple(inputs), (out, *side), saved, weights, passes_on, narrows, scratch, scratch_back,
                     gemms, gemms_back, (), moved, moved_back, moved_ahead, kernels, kernels_back,
                     module))  # fmt: skip
        return out

    def _add(self, op: Op) -> None:
        op.times = self.times
        for value in (*op.inputs, *op.outputs):
            storage = value.storage
            storage.copies = self.times if storage.last_use < 0 and value in op.outputs else storage.copies
            if storage.last_use < FOREVER:
                storage.last_use = self._count
        self.segments[-1].ops.append(op)
        self._count += 1

    # Views

    def alias(self, x: Value, elements: int | None = None, name: str = "view") -> Value:
        """A view whose backward pass makes a new tensor of the size of `x`: a slice, or a transposed view whose
        gradient has another layout."""
        return self.chunk(x, x.elements if elements is None else elements, name=name)[0]

    def chunk(self, x: Value, *elements: int, name: str = "chunk") -> list[Value]:
        """Views of parts; the backward pass concatenates their gradients into a new tensor."""
        parts = [Value(count, x.bytes_each, x.storage, x.needs_grad) for count in elements]
        self._add(Op(name, (x,), tuple(parts), kernels=0, moved_back=2 * x.bytes))
        return parts
