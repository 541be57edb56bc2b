"""Records operators on the meta device as autograd sees them: what each reads, makes, multiplies and saves, and how
long Python's variables hold each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from finetune.plan.forward.cuts import SOFTMAX, WRITE
from finetune.plan.forward.operators import CAST, CONVOLUTION, LAYER_NORM, PRODUCTS, TURNS
from finetune.plan.values import HALF_BYTES

# Operators that create nothing: their result is the input under another shape.
VIEWS = {"view", "_unsafe_view", "t", "unsqueeze", "squeeze", "alias", "detach", "expand", "reshape",
         "lift_fresh", *TURNS}  # fmt: skip
PARTS = {"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow"}
# Their backward pass reads their first output (torch 2.13, tools/autograd/derivatives.yaml).
SAVE_OUTPUT = {"relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal", SOFTMAX, "_log_softmax"}


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """Identifies values by their Python objects, and storages by their addresses while they are alive. `dtype`: the
    model's, counted as two bytes whatever it is; `kept`: values of its output; `result`: the loss; `own`: the first
    output of each autograd function of the model's own, by the number of its call; `is_relaid`: whether a conversion
    between precisions has also given a value another layout."""

    def __init__(self, weights: dict[int, str], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weights, self.dtype = weights, dtype
        self.values: Any = WeakIdKeyDictionary()  # a tensor's number
        self.facts: list[list[int]] = []  # of each value: elements, bytes per element, storage, whether gradients flow
        self.inside: set[int] = set()  # values made without gradients: few need one, such as a function's own result
        self.storages: dict[int, int] = {}  # numbers, by address
        self.alive: dict[int, StorageWeakRef] = {}
        self.last: list[int] = []  # of each storage: the operator before which it was last seen alive
        self.ops: list[dict[str, Any]] = []
        self.pending: list[int] = []
        self.segment = 0
        self.is_paused = False
        self.kept: list[int] = []
        self.result = 0
        self.own: dict[int, int] = {}
        self.is_relaid = False

    def place(self, tensor: torch.Tensor) -> int:
        address = place_of(tensor)
        if self.storages.get(address) not in self.alive:
            self.storages[address] = len(self.last)
            self.alive[len(self.last)] = StorageWeakRef(tensor.untyped_storage())
            self.last.append(len(self.ops))
        return self.storages[address]

    def look(self) -> None:
        """Forgets storages that nothing holds any more. All others are alive at the operator that comes next."""
        self.alive = {number: storage for number, storage in self.alive.items() if not storage.expired()}

    def stamp(self) -> None:
        for number in self.alive:
            self.last[number] = len(self.ops)

    def number(self, tensor: torch.Tensor, grad: bool = False) -> int:
        if tensor not in self.values:
            self.values[tensor] = len(self.facts)
            size = HALF_BYTES if tensor.dtype == self.dtype else tensor.element_size()
            self.facts.append([tensor.numel(), size, self.place(tensor), int(grad)])
        return int(self.values[tensor])

    def keep(self, tensor: torch.Tensor) -> None:
        """Autograd saves inputs before an operator runs, and outputs after it. It keeps none of them alive here."""
        if place_of(tensor) in self.weights or self.is_paused:
            return
        place = self.place(tensor)
        last: dict[str, Any] = self.ops[-1] if self.ops else {"name": "", "out": (), "part": False}
        first, *others = [self.facts[one][2] for one in last["out"] if not last["part"]] or [-1]
        can_save = place in others or (place == first and last["name"] in SAVE_OUTPUT)
        is_output = can_save and place not in last["saved"]  # if it was saved before, the next operator saves it again
        (last["saved"] if is_output else self.pending).append(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if name in ANSWERS:
            return ANSWERS[name](self, func, *args, **kwargs)
        self.look()
        out = func(*(self.placed(*args) if name == "index" else args), **kwargs)
        self.record(name, _tensors((args, kwargs)), _tensors(out))
        return out

    def placed(self, x: torch.Tensor, places: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """With numbers in place of a mask of the tokens that equal one, such as the end: each text has one of these."""
        found = list[torch.Tensor | None]()
        for one in places:
            is_mask = one is not None and one.dtype == torch.bool and self.is_made_by("eq", one)
            found += [one.new_empty(len(one), dtype=torch.long)] * one.dim() if one is not None and is_mask else [one]
        return x, found

    def is_made_by(self, name: str, one: torch.Tensor) -> bool:
        return any(op["name"] == name and self.values.get(one) in op["out"] for op in self.ops)

    def record(self, name: str, given: list[torch.Tensor], outs: list[torch.Tensor], **more: Any) -> None:
        names = [self.weights[place_of(one)] for one in given if place_of(one) in self.weights]
        inputs = [one for one in given if place_of(one) not in self.weights]
        if names and not inputs and all(place_of(one) in self.weights for one in outs):
            return  # a weight under another shape
        for one in inputs:
            if is_own(one.grad_fn) and (call := one.grad_fn._sequence_nr()) not in self.own:
                self.own[call] = self.number(one)
                maker = next(op for op in reversed(self.ops) if self.own[call] in op["out"])
                many = len(one.grad_fn._raw_saved_tensors)  # they came before those of this operator
                maker["saved"], self.pending = maker["saved"] + self.pending[:many], self.pending[many:]
        if name in VIEWS.difference(TURNS) and len(inputs) == 1 and outs[0].numel() == inputs[0].numel():
            self.values[outs[0]] = self.number(inputs[0])
            return
        is_part = name in PARTS or (name in VIEWS and bool(inputs) and place_of(outs[0]) == place_of(inputs[0]))
        numbers = [self.number(one) for one in inputs]
        grad = self.flows(inputs, numbers) or bool(names)
        made = [self.number(one, grad and (one.is_floating_point() or one.is_complex())) for one in outs]
        self.inside.update(() if torch.is_grad_enabled() else made)
        if name == WRITE and grad and torch.is_grad_enabled():
            for one in (outs[0], outs[0]._base):
                if one is not None:
                    self.facts[self.number(one)][3] = 1
        if name == CAST and grad and inputs and outs[0].is_contiguous() and not inputs[0].is_contiguous():
            self.is_relaid = True
        if name == LAYER_NORM and inputs and not inputs[0].is_contiguous():
            more["copies"] = True
        self.stamp()
        self.ops.append({"name": name, "in": numbers, "out": made, "saved": self.pending, "weights": names,
                         "gemms": [GEMMS.get(name, _matrices)(given, outs[0])] if name in PRODUCTS else [],
                         "segment": self.segment, "part": is_part, "inside": not torch.is_grad_enabled(),
                         **more})  # fmt: skip
        self.pending = []

    def flows(self, inputs: list[torch.Tensor], numbers: list[int]) -> bool:
        """Whether gradients flow back to any of these; with gradients on, what was made without them gets none."""
        if torch.is_grad_enabled():
            for one, number in zip(inputs, numbers, strict=True):
                self.facts[number][3] &= one.requires_grad or number not in self.inside
        return any(self.facts[number][3] for number in numbers)


def _answer(recording: Recording, func: Any, one: torch.Tensor) -> Any:
    """All is seen, no token is padding, no layer is left out; numbers on the CPU are sizes."""
    if not one.is_meta and one.dtype != torch.bool:
        return func(one)
    asked = [op["name"] for op in recording.ops[-2:]]
    return asked[-1] == "all" or asked == ["sum", "eq"]


def _same(recording: Recording, func: Any, one: torch.Tensor, *given: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    """Each text has as many ends as the one before it."""
    return tuple(one.new_empty(size) for size in (1, 0, 0))


def _places(recording: Recording, func: Any, one: torch.Tensor) -> Any:
    """Each sample has a label, which is 0 or more."""
    is_label = recording.is_made_by("ge", one)
    return one.new_empty((one.numel(), one.dim()), dtype=torch.long) if is_label else func(one)


# Operators that read values.
ANSWERS: dict[str, Callable[..., Any]] = {"_local_scalar_dense": _answer, "unique_consecutive": _same,
                                          "nonzero": _places}  # fmt: skip


class _Made(torch.autograd.Function):  # type: ignore[misc]
    """A tensor that needs a gradient if what it is made of does, and that autograd does not keep alive."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[Any], Any], *given: Any) -> Any:
        return make(given[0])


class Fused(TorchFunctionMode):  # type: ignore[misc]
    """Attention and dropout as one operator each, whatever they are made of on this device."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if func is torch.nn.functional.dropout:
            return self.dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def one(self, name: str, given: list[Any], make: Callable[[Any], Any], **more: Any) -> Any:
        recording = self.recording
        recording.look()
        recording.is_paused = True
        out = _Made.apply(make, *given)
        recording.is_paused, recording.pending = False, []
        recording.record(name, given, [out], **more)
        return out

    def dropout(self, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return self.one("dropout", [x], torch.empty_like) if p and training else x

    def attention(self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                  is_causal: bool = False, **other: Any) -> Any:  # fmt: skip
        rows, heads, tokens, width = query.shape
        many = rows * heads
        gemms = [[tokens, key.shape[-2], width, many], [tokens, value.shape[-1], key.shape[-2], many]]

        def make(x: Any) -> Any:  # laid out as the queries are
            out = x.new_empty((*x.shape[:-1], value.shape[-1]))
            return out if x.is_contiguous() else out.transpose(1, 2).contiguous().transpose(1, 2)

        given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        laid = [name for name, one in zip("qkv", given, strict=False) if one.is_contiguous()]
        how = {"dropout": dropout_p, "causal": is_causal, "by_head": "".join(laid)}
        if key.shape[1] != heads and not other.get("enable_gqa"):
            how["broadcast"] = True
        return self.one("attention", given, make, gemms=gemms, heads=how)


def _matrices(given: list[torch.Tensor], out: torch.Tensor) -> list[Any]:
    """The sizes of a product."""
    one, two = given[-2:]
    return [one.shape[-2], two.shape[-1], one.shape[-1], one.shape[0] if one.dim() == len("bmk") else 1]


def _unfolded(given: list[torch.Tensor], out: torch.Tensor) -> list[Any]:
    """Of a convolution, as if images were unfolded."""
    return [out.numel() // out.shape[1], given[1].shape[0], given[1][0].numel(), 1]


def _by_expert(given: list[torch.Tensor], out: torch.Tensor) -> list[Any]:
    """Of experts that are evenly loaded."""
    one, two = given[:2]
    return [Fraction(one.shape[0], two.shape[0]), two.shape[-1], one.shape[-1], two.shape[0]]


GEMMS = {CONVOLUTION: _unfolded, "_grouped_mm": _by_expert}


def is_own(node: Any) -> bool:
    """Whether a node of autograd's graph is a function that a model brings itself."""
    return isinstance(node, BackwardCFunction) and node.name() != f"{_Made.__name__}Backward"


def place_of(tensor: torch.Tensor) -> int:
    """The address of its storage."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [one for one in tree_iter(found) if isinstance(one, torch.Tensor)]
