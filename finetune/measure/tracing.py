"""Record the forward pass of any transformers architecture, operator by operator, without its weights:

    python -m finetune.measure.tracing CONFIG.json causal_lm OUT.json

The model is built on the meta device, where tensors have shapes but no memory, and its loss is computed for five small
batches. What each operator creates, multiplies and saves depends on samples b and tokens t as
c + d t + b (e + f t + g t^2), so five batches determine all five coefficients. `finetune.plan.forward.traced` turns the
recording into a plan's tape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.plan.model import HEADS

TOKENS = 64
ROWS = 2  # with only one, some operators copy nothing
POINTS = ((ROWS, TOKENS), (ROWS, 2 * TOKENS), (ROWS, 4 * TOKENS), (ROWS + 1, TOKENS), (ROWS + 1, 2 * TOKENS))
# Operators that create nothing: their result is the input under another shape.
VIEWS = {"view", "_unsafe_view", "transpose", "permute", "t", "unsqueeze", "squeeze", "alias", "detach", "expand",
         "reshape", "lift_fresh"}  # fmt: skip
PARTS = {"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
PASSES_ON = {"add", "clone", "add_", "copy_"}


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """Identifies values by their Python objects, which all stay alive to the end, and storages by their addresses."""

    def __init__(self, weights: dict[int, str]) -> None:
        super().__init__()
        self.weights = weights
        self.alive: list[torch.Tensor] = []
        self.values: dict[int, int] = {}  # a tensor's number, by id
        self.facts: list[list[int]] = []  # of each value: elements, bytes per element, storage, whether gradients flow
        self.storages: dict[int, int] = {}
        self.ops: list[dict[str, Any]] = []
        self.pending: list[int] = []
        self.segment = 0
        self.is_paused = False

    def number(self, tensor: torch.Tensor, grad: bool = False) -> int:
        if id(tensor) not in self.values:
            self.alive.append(tensor)
            place = self.storages.setdefault(_place(tensor), len(self.storages))
            self.values[id(tensor)] = len(self.facts)
            self.facts.append([tensor.numel(), tensor.element_size(), place, int(grad)])
        return self.values[id(tensor)]

    def same(self, out: torch.Tensor, given: torch.Tensor) -> None:
        """`out` is `given` under another shape."""
        self.alive.append(out)
        self.values[id(out)] = self.number(given)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves inputs before an operator runs, and outputs after it."""
        if _place(tensor) in self.weights or self.is_paused:
            return tensor
        number = self.number(tensor)
        place = self.facts[number][2]
        made = [self.facts[one][2] for one in self.ops[-1]["out"]] if self.ops else []
        (self.ops[-1]["saved"] if place in made else self.pending).append(place)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self.record(func.overloadpacket.__name__, list(_tensors([args, kwargs or {}])), list(_tensors(out)))
        return out

    def record(
        self, name: str, given: list[torch.Tensor], outs: list[torch.Tensor], gemms: list[list[int]] | None = None
    ) -> None:
        names = [self.weights[_place(one)] for one in given if _place(one) in self.weights]
        inputs = [one for one in given if _place(one) not in self.weights]
        if names and not inputs and all(_place(one) in self.weights for one in outs):
            return  # a weight under another shape
        if name in VIEWS and len(inputs) == 1 and outs[0].numel() == inputs[0].numel():
            self.same(outs[0], inputs[0])
            return
        is_part = name in PARTS or (name in VIEWS and _place(outs[0]) == _place(inputs[0]) if inputs else False)
        if gemms is None and name in PRODUCTS:
            *_, one, two = given
            gemms = [[one.shape[-2], two.shape[-1], one.shape[-1], one.shape[0] if one.dim() == 3 else 1]]
        numbers = [self.number(one) for one in inputs]
        grad = bool(names) or any(self.facts[number][3] for number in numbers)
        made = [self.number(one, grad and one.is_floating_point()) for one in outs]
        self.ops.append({"name": name, "in": numbers, "out": made, "saved": self.pending, "weights": names,
                         "gemms": gemms or [], "segment": self.segment, "part": is_part})  # fmt: skip
        self.pending = []


class Fused(TorchFunctionMode):  # type: ignore[misc]
    """Attention as one operator, like flash attention: it saves its inputs and output, and one sum per row."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attention(*args, **(kwargs or {}))

    def attention(self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                  is_causal: bool = False, **other: Any) -> Any:  # fmt: skip
        recording = self.recording
        recording.is_paused = True
        rows, heads, tokens, _ = query.shape
        out = query.new_empty((rows, tokens, heads, value.shape[-1])).transpose(1, 2)  # as flash attention lays it out
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        recording.is_paused = False
        looked = key.shape[-2] // 2 if is_causal and attn_mask is None else key.shape[-2]
        gemms = [[tokens, looked, query.shape[-1], rows * heads], [tokens, value.shape[-1], looked, rows * heads]]
        recording.pending = []
        recording.record("attention", [query, key, value], [out, sums], gemms)
        recording.ops[-1]["saved"] = [
            recording.facts[recording.number(one)][2] for one in (query, key, value, out, sums)
        ]
        return out.requires_grad_() if query.requires_grad else out


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple | dict):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _tensors(one)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def record(model: torch.nn.Module, layers: list[torch.nn.Module], rows: int, tokens: int, head: str) -> Recording:
    weights = {_place(parameter): name for name, parameter in model.named_parameters()}
    recording = Recording(weights)

    def enter(module: torch.nn.Module, given: Any) -> None:
        recording.segment += 1

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layers[-1].register_forward_hook(lambda module, given, out: enter(module, given))] if layers else []
    ids = torch.empty((rows, tokens), dtype=torch.long, device="meta")
    labels = ids if head != "sequence_classification" else torch.empty(rows, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(recording.keep, lambda kept: kept), recording, Fused(recording):
        model(input_ids=ids, labels=labels)
    for hook in hooks:
        hook.remove()
    return recording


def fitted(found: list[int]) -> list[float]:
    """The coefficients c, d, e, f, g from the values at `POINTS`."""
    one, two, four, other, last = map(Fraction, found)
    size = Fraction(TOKENS)
    square = (four - 3 * two + 2 * one) / (6 * size**2)  # coefficients of t^2, t and 1 with ROWS rows
    slope = (two - one) / size - 3 * square * size
    start = one - slope * size - square * size**2
    each_square = square / ROWS
    first, second = other - one - each_square * size**2, last - two - 4 * each_square * size**2
    each = (second - first) / size
    base = first - each * size
    return [float(number) for number in (start - ROWS * base, slope - ROWS * each, base, each, each_square)]


def traced(config: dict[str, Any], head: str) -> dict[str, Any]:
    """Without a key-value cache if possible: without one, some models' masks need tensor contents, which meta lacks."""
    failed: Exception | None = None
    for attention, caches in (("sdpa", False), ("sdpa", True), ("eager", True)):
        try:
            return _traced({**config, "use_cache": caches}, head, attention)
        except (RuntimeError, ValueError) as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _auto(head: str) -> Any:
    """The transformers class that builds models with this head."""
    return getattr(transformers, "AutoModel" + next(end for end, known in HEADS.items() if known == head))


def _traced(config: dict[str, Any], head: str, attention: str) -> dict[str, Any]:
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = _auto(head).from_config(made, dtype=torch.bfloat16, attn_implementation=attention)
    layers = layers_of(model.train())
    runs = [record(model, layers, rows, tokens, head) for rows, tokens in POINTS]
    if len({(len(run.facts), tuple(one["name"] for one in run.ops)) for run in runs}) > 1:
        raise ValueError("its operators differ between input lengths")
    first, table = runs[0], model.get_input_embeddings().weight
    return {
        "tensors": [[name, list(one.shape), _layer(name)] for name, one in model.named_parameters()],
        "layers": len(layers),
        "hidden_size": table.shape[-1],
        "vocab_size": table.shape[0],
        "values": [
            [fitted([run.facts[at][0] for run in runs]), *first.facts[at][1:]] for at in range(len(first.facts))
        ],
        "ops": [{**op, "gemms": _gemms([run.ops[at]["gemms"] for run in runs])} for at, op in enumerate(first.ops)],
    }


def _gemms(runs: list[list[list[int]]]) -> list[list[list[float]]]:
    return [[fitted([run[at][side] for run in runs]) for side in range(4)] for at in range(len(runs[0]))]


def _layer(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def main(write: Callable[[str], object] = print) -> int:
    config, head, out = sys.argv[1:]
    try:
        found = traced(json.loads(Path(config).read_text()), head)
    except Exception as error:  # without data, an architecture's modules can raise anything
        write(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return 1
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
