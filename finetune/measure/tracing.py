"""Record the forward pass of any transformers architecture, operator by operator, without its weights:

    python -m finetune.measure.tracing CONFIG.json causal_lm sdpa OUT.json

The model is built on the meta device, where tensors have shapes but no memory, and its loss is computed for a few small
batches. What each operator creates, multiplies and saves is a polynomial of the batch's sizes, so as many batches as it
has terms determine its coefficients. `finetune.plan.forward.traced` turns the recording into a plan's tape.
"""

from __future__ import annotations

import gc
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import RequestError
from finetune.measure.fitting import TOKENS, UNIT, at_batch, far_points, fill, fitted, odd_points, points
from finetune.measure.loops import fold
from finetune.measure.models import config_in, on_meta, samples
from finetune.measure.own_functions import backward_bytes
from finetune.measure.recording import Fused, Recording, place_of
from finetune.models.adapters import heads_of
from finetune.models.composite import unread
from finetune.models.source import positions_of
from finetune.plan.families.parts import VECTORS
from finetune.plan.forward.parts import Batch
from finetune.plan.tracing import REFUSED
from finetune.plan.values import HALF_BYTES

# Keys of configs: chunks of state-space and linear attention layers, windows to whose multiples texts are filled up.
CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size", "attention_window")
CHUNK, LOOP = 64, 3  # tokens, of layers whose config says none; chunks in a unit, such that each text has enough
WIDEST = 512  # tokens, of chunks and windows that no key names
# Packages with kernels. Without them, and on the meta device, layers compute the same with torch's operators.
KERNELS = ("causal_conv1d", "fla", "mamba_ssm")
STEPS = (
    "its layers have other operators, the longer a text is, and not in a loop over tokens alone: their memory does not "
    "follow from that of short texts."
)
VALUES = (
    "its layers read values out of tensors, such as how many tokens each expert gets, and a plan knows sizes alone."
)
SHORT, LONG = 16, 1 << 20  # windows shorter and longer than any text here


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """What gradient checkpointing recomputes, or else the model's longest list of modules, by name; those of towers
    that no text reaches come last."""
    aside = tuple(unread(model))
    found: dict[str, torch.nn.Module] = {}
    longest: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{one}.") for one in found)
        if isinstance(module, GradientCheckpointingLayer) and not is_inside:
            found[name] = module
        if isinstance(module, torch.nn.ModuleList) and len(module) > len(longest):
            longest = {f"{name}.{at}": one for at, one in enumerate(module)}
    found = found or longest
    return dict(sorted(found.items(), key=lambda one: any(name.startswith(f"{one[0]}.") for name in aside)))


def batch_of(head: str, sizes: Batch, model: Any) -> dict[str, torch.Tensor]:
    """What a model with this head is trained on, on the meta device, with floats as the model has them."""
    one = samples(model.config.to_dict(), head, sizes.tokens)
    if sizes.targets:
        one["labels"] = torch.zeros(sizes.targets, dtype=torch.long)
    if head == VECTORS:
        del one["labels"]
    return {
        name: torch.empty(
            (sizes.rows, *each.shape), dtype=model.dtype if each.is_floating_point() else each.dtype, device="meta"
        )
        for name, each in one.items()
    }


def record(model: Any, layers: Iterable[torch.nn.Module], head: str, sizes: Batch) -> Recording:
    recording = Recording({place_of(parameter): name for name, parameter in model.named_parameters()}, model.dtype)

    def enter(module: torch.nn.Module, *given: Any) -> None:
        recording.segment += 1

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(enter) for layer in layers]
    batch = batch_of(head, sizes, model)
    collects = gc.isenabled()
    gc.disable()  # what lies in a reference cycle would live until the collector happens to run
    try:
        with torch.autograd.graph.saved_tensors_hooks(recording.keep, lambda kept: kept), recording, Fused(recording):
            out = model(**batch)
            recording.look()
            recording.stamp()
    finally:
        if collects:
            gc.enable()
        for hook in hooks:
            hook.remove()
    result = "last_hidden_state" if head == VECTORS else "loss"
    recording.result = recording.number(out[result])
    rest = [one for name, one in out.items() if name != result and head != VECTORS]
    recording.kept = [recording.number(one) for one in rest if isinstance(one, torch.Tensor)]
    if recording.own:
        made = {number: op for op in recording.ops for number in op["out"]}
        own = [made[number] for _, number in sorted(recording.own.items())]
        found = backward_bytes(model, batch, result)
        for op, size in zip(own, found, strict=True) if len(own) == len(found) else ():
            op["back"] = size
    return recording


def traced(config: dict[str, Any], head: str, attention: str) -> dict[str, Any]:
    """What a plan reads of a model. `attention`: "sdpa" or "eager"; the latter also if the model has no other. Raises
    whatever the model's modules raise without data."""
    window = getattr(config_in(config).get_text_config(), "sliding_window", None)
    if not window:
        return {**_traced(config, head, attention), "window": None, "beyond": None}
    beyond = _traced(config, head, attention, SHORT)["trace"]
    return {**_traced(config, head, attention, LONG), "window": window, "beyond": beyond}


def _traced(config: dict[str, Any], head: str, attention: str, window: int | None = None) -> dict[str, Any]:
    """In bf16 if possible, which shows what is computed in fp32 there, and without a key-value cache: on the meta
    device, some models' masks need one. In fp32 besides, if a layout depends on the precision."""
    failed = list[Exception]()
    for dtype, how, caches in product((torch.bfloat16, torch.float32), (attention, "eager"), (False, True)):
        try:
            found = _recorded(config, head, {"attn_implementation": how, "dtype": dtype}, caches, window)
        except (RuntimeError, ValueError) as error:
            failed.append(error)
            continue
        if dtype == torch.float32:
            return {**found, "whole": True}
        if found.pop("relaid"):
            with suppress(RuntimeError, ValueError):  # on the meta device, products of experts have bf16 alone
                whole = _recorded(config, head, {"attn_implementation": how, "dtype": torch.float32}, caches, window)
                found["trace"]["in_fp32"] = whole["trace"]
        return found
    told = failed[2]  # the first may only say that it has no such attention
    raise RequestError(VALUES) if any(one in str(told) for one in ("meta tensor", "torch.nonzero")) else told


def _recorded(
    config: dict[str, Any], head: str, how: dict[str, Any], caches: bool, window: int | None
) -> dict[str, Any]:
    model = on_meta(config, head, how, window)
    model.config.use_cache = caches  # as the Trainer sets it; a part with a config of its own keeps its cache
    layers = layers_of(model)
    # The first pass moves what the model keeps beside its weights.
    units = _units(model.config)
    record(model, layers.values(), head, points(head, units[0])[0])
    found = next(filter(None, (_trace(model, layers.values(), head, unit) for unit in units)), None)
    if found is None:
        raise RequestError(STEPS)
    source = inspect.getsource(sys.modules[type(model).__module__])
    without = [name for name in KERNELS if f'"{name}"' in source]
    more = {"without": without} if without else {}
    return {**found, **_facts(model, layers), **more}


def _units(config: Any) -> list[int]:
    """Of tokens, in the order in which they are tried."""
    own = next((size for name in CHUNKS if (size := _side(config, name))), None)
    first, *others = dict.fromkeys((own or UNIT, LOOP * (own or CHUNK), WIDEST))
    return [first, *(unit for unit in others if TOKENS[-1] * unit <= positions_of(config))]


def _side(config: Any, name: str) -> int | None:
    """What a config says of tokens: once, or of each layer."""
    found = getattr(config.get_text_config(), name, None)
    return max(found, default=None) if isinstance(found, list) else found if isinstance(found, int) else None


def _trace(model: Any, layers: Iterable[torch.nn.Module], head: str, unit: int) -> dict[str, Any] | None:
    """None if the recordings differ by more than loops, or if what is fitted does not hold for longer texts."""
    runs = [record(model, layers, head, batch) for batch in points(head, unit)]
    loops = len({len(run.ops) for run in runs}) > 1
    far = _recordings(model, layers, head, far_points(head, unit, positions_of(model.config), loops))
    if not fold([*runs, *far.values()]):
        return None
    first = runs[0]
    sizes = [fitted([run.facts[at][0] for run in runs], head, unit) for at in range(len(first.facts))]
    for batch, run in far.items():
        if any(at_batch(size, head, batch) != one[0] for size, one in zip(sizes, run.facts, strict=True)):
            return None
    trace = {
        "values": [[size, *one[1:]] for size, one in zip(sizes, first.facts, strict=True)],
        "ops": [_op([run.ops[at] for run in runs], head, unit) for at in range(len(first.ops))],
        "last": first.last,
        "kept": first.kept,
        "result": first.result,
    }
    odd = _recordings(model, layers, head, odd_points(head, unit) if unit != UNIT else [], 2)
    if odd and fold(list(odd.values())):
        fill(trace, first, *next(iter(odd.items())), head)
    return {"trace": trace, "layers": first.segment // 2, "relaid": first.is_relaid}


def _recordings(
    model: Any, layers: Iterable[torch.nn.Module], head: str, batches: Iterable[Batch], many: int = 1
) -> dict[Batch, Recording]:
    """Of the first so many batches that the model takes."""
    found = dict[Batch, Recording]()
    for batch in batches:
        with suppress(RuntimeError, ValueError):
            if len(found) < many:
                found[batch] = record(model, layers, head, batch)
    return found


def _op(runs: list[dict[str, Any]], head: str, unit: int) -> dict[str, Any]:
    op, products = runs[0], zip(*(run["gemms"] for run in runs), strict=True)
    gemms = [[fitted([*sides], head, unit) for sides in zip(*product, strict=True)] for product in products]
    found = {**op, "gemms": gemms}
    return found | {name: fitted([run[name] for run in runs], head, unit) for name in ("times", "back") if name in op}


def _facts(model: Any, layers: Iterable[str]) -> dict[str, Any]:
    text, frozen = model.config.get_text_config(), unread(model)
    return {
        "tensors": [
            [
                name,
                list(one.shape),
                next((at for at, layer in enumerate(layers) if name.startswith(f"{layer}.")), None),
                *([False] if name in frozen or not one.requires_grad else []),
            ]
            for name, one in model.named_parameters()
        ],
        "buffers": [
            [name, list(one.shape), HALF_BYTES if one.dtype == model.dtype else one.element_size()]
            for name, one in model.named_buffers()
        ],
        "hidden_size": getattr(text, "hidden_size", None) or max(getattr(text, "hidden_sizes", [0])),
        "vocab_size": getattr(text, "vocab_size", 0),
        "head_modules": heads_of(model),
    }


def main(write: Callable[[str], object] = print) -> int:
    config, head, attention, out = sys.argv[1:]
    for name in KERNELS:
        sys.modules[name] = None  # type: ignore[assignment] # it cannot be imported
    try:
        found = traced(json.loads(Path(config).read_text()), head, attention)
    except RequestError as error:
        write(str(error))
        return REFUSED
    except Exception as error:  # without data, an architecture's modules can raise anything
        write(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
