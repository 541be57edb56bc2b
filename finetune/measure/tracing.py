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
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import RequestError
from finetune.measure.fitting import FAR, NEAR, UNIT, far_point, fitted, points
from finetune.measure.loops import fold
from finetune.measure.models import class_of, samples
from finetune.measure.recording import Fused, Recording, place_of
from finetune.models.adapters import heads_of
from finetune.models.composite import unread
from finetune.models.source import positions_of
from finetune.plan.families.parts import SEQ2SEQ, VECTORS
from finetune.plan.forward.parts import Batch, terms
from finetune.plan.tracing import REFUSED, TRUSTS

CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size")  # keys of configs of state-space and linear attention layers
CHUNK, LOOP = 64, 3  # tokens, of layers whose config says none; chunks in a unit, such that each text has enough
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


def batch_of(head: str, sizes: Batch, config: Any) -> dict[str, torch.Tensor]:
    """What a model with this head is trained on, on the meta device, with floats in bf16."""
    one = samples(config.to_dict(), head, sizes.tokens)
    if sizes.targets:
        one["labels"] = torch.zeros(sizes.targets, dtype=torch.long)
    if head == VECTORS:
        del one["labels"]
    return {
        name: torch.empty(
            (sizes.rows, *each.shape), dtype=torch.bfloat16 if each.is_floating_point() else each.dtype, device="meta"
        )
        for name, each in one.items()
    }


def record(model: torch.nn.Module, layers: Iterable[torch.nn.Module], head: str, sizes: Batch) -> Recording:
    recording = Recording({place_of(parameter): name for name, parameter in model.named_parameters()})

    def enter(module: torch.nn.Module, *given: Any) -> None:
        recording.segment += 1

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(enter) for layer in layers]
    batch = batch_of(head, sizes, model.config)
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
    result = "last_hidden_state" if head == VECTORS else "loss"
    recording.result = recording.number(out[result])
    rest = [one for name, one in out.items() if name != result and head != VECTORS]
    recording.kept = [recording.number(one) for one in rest if isinstance(one, torch.Tensor)]
    for hook in hooks:
        hook.remove()
    return recording


def traced(config: dict[str, Any], head: str, attention: str) -> dict[str, Any]:
    """What a plan reads of a model. `attention`: "sdpa" or "eager"; the latter also if the model has no other. Raises
    whatever the model's modules raise without data."""
    window = getattr(_config_of(config).get_text_config(), "sliding_window", None)
    if not window:
        return {**_traced(config, head, attention), "window": None, "beyond": None}
    beyond = _traced(config, head, attention, SHORT)["trace"]
    return {**_traced(config, head, attention, LONG), "window": window, "beyond": beyond}


def _traced(config: dict[str, Any], head: str, attention: str, window: int | None = None) -> dict[str, Any]:
    """Without a key-value cache if possible: on the meta device, some models' masks need one."""
    failed = list[Exception]()
    for how, caches in product((attention, "eager"), (False, True)):
        try:
            return _recorded(config, head, how, caches, window)
        except (RuntimeError, ValueError) as error:
            failed.append(error)
    told = failed[2]  # the first may only say that it has no such attention
    raise RequestError(VALUES) if any(one in str(told) for one in ("meta tensor", "torch.nonzero")) else told


def _config_of(config: dict[str, Any]) -> Any:
    """As the code in the model's folder has it, if the user trusts that."""
    if not config.get(TRUSTS):
        return transformers.AutoConfig.for_model(**config)
    values = {name: one for name, one in config.items() if name not in ("auto_map", "_name_or_path", "model_type")}
    return transformers.AutoConfig.from_pretrained(config["_name_or_path"], **values)  # with TRUSTS


def _built(made: Any, head: str, **how: Any) -> Any:
    """A model with this head; for vectors one without a head, whose pooler would go unused."""
    if head == VECTORS:
        try:
            return transformers.AutoModel.from_config(made, add_pooling_layer=False, **how)
        except TypeError:
            return transformers.AutoModel.from_config(made, **how)
    return class_of(head, made).from_config(made, **how)


def _recorded(config: dict[str, Any], head: str, attention: str, caches: bool, window: int | None) -> dict[str, Any]:
    made = _config_of(config)
    text = made.get_text_config()
    if getattr(text, "pad_token_id", 0) is None:
        text.pad_token_id = 0  # classifiers of several texts ask for one
    if head == SEQ2SEQ and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    how = {"trust_remote_code": True} if "auto_map" in config else {}
    with torch.device("meta"):
        model = _built(made, head, dtype=torch.bfloat16, attn_implementation=attention, **how)
    if window:  # now, because parameters may be as large as it: a bias by distance
        parts = (part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
        for its in (part.config.get_text_config() for part in parts):
            if getattr(its, "sliding_window", None):
                its.sliding_window = window
    model.config.use_cache = caches  # as the Trainer sets it; a part with a config of its own keeps its cache
    layers = layers_of(model.train())
    own = next((size for name in CHUNKS if isinstance(size := getattr(text, name, None), int)), None)
    units = own or UNIT, LOOP * (own or CHUNK)
    found = next(filter(None, (_trace(model, layers.values(), head, unit) for unit in units)), None)
    if found is None:
        raise RequestError(STEPS)
    source = inspect.getsource(sys.modules[type(model).__module__])
    without = [name for name in KERNELS if f'"{name}"' in source]
    more = {"without": without} if without else {}
    return {**found, **_facts(model, layers), **more}


def _trace(model: Any, layers: Iterable[torch.nn.Module], head: str, unit: int) -> dict[str, Any] | None:
    """None if the recordings differ by more than loops, or if what is fitted does not hold for longer texts."""
    runs = [record(model, layers, head, batch) for batch in points(head, unit)]
    loops = len({len(run.ops) for run in runs}) > 1
    far = far_point(head, unit, positions_of(model.config), NEAR if loops else FAR)
    runs += [record(model, layers, head, far)] if far else []
    if not fold(runs):
        return None
    tried = runs.pop() if far else None
    first = runs[0]
    sizes = [fitted([run.facts[at][0] for run in runs], head, unit) for at in range(len(first.facts))]
    if far and tried and any(_at(size, head, far) != one[0] for size, one in zip(sizes, tried.facts, strict=True)):
        return None
    trace = {
        "values": [[size, *one[1:]] for size, one in zip(sizes, first.facts, strict=True)],
        "ops": [_op([run.ops[at] for run in runs], head, unit) for at in range(len(first.ops))],
        "last": first.last,
        "kept": first.kept,
        "result": first.result,
    }
    return {"trace": trace, "layers": first.segment // 2}


def _op(runs: list[dict[str, Any]], head: str, unit: int) -> dict[str, Any]:
    op = runs[0]
    gemms = [
        [fitted([run["gemms"][at][side] for run in runs], head, unit) for side in range(4)]
        for at in range(len(op["gemms"]))
    ]
    times = {"times": fitted([run["times"] for run in runs], head, unit)} if "times" in op else {}
    return {**op, "gemms": gemms, **times}


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
        "buffers": [[name, list(one.shape), one.element_size()] for name, one in model.named_buffers()],
        "hidden_size": getattr(text, "hidden_size", None) or max(text.hidden_sizes),
        "vocab_size": getattr(text, "vocab_size", 0),
        "head_modules": heads_of(model),
    }


def _at(size: list[float], head: str, batch: Batch) -> int:
    return round(sum(one * term for one, term in zip(size, terms(head, batch), strict=True)))


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
