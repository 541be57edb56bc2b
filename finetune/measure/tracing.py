"""Record the forward pass of any transformers architecture, operator by operator, without its weights:

    python -m finetune.measure.tracing CONFIG.json causal_lm sdpa OUT.json

The model is built on the meta device, where tensors have shapes but no memory, and its loss is computed for a few small
batches. What each operator creates, multiplies and saves is a polynomial of the batch's sizes, so as many batches as it
has terms determine its coefficients. `finetune.plan.forward.traced` turns the recording into a plan's tape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.measure.fitting import fitted, points
from finetune.measure.recording import Fused, Recording, place_of
from finetune.models.adapters import heads_of
from finetune.plan.families.parts import CLASSES, IMAGES, SEQ2SEQ, SPANS, VECTORS
from finetune.plan.forward.parts import Batch
from finetune.plan.model import HEADS
from finetune.plan.tracing import TRUSTS

SHORT, LONG = 16, 1 << 20  # windows shorter and longer than any text here


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """What gradient checkpointing recomputes, or else the model's longest list of modules, by name."""
    found: dict[str, torch.nn.Module] = {}
    longest: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{one}.") for one in found)
        if isinstance(module, GradientCheckpointingLayer) and not is_inside:
            found[name] = module
        if isinstance(module, torch.nn.ModuleList) and len(module) > len(longest):
            longest = {f"{name}.{at}": one for at, one in enumerate(module)}
    return found or longest


def batch_of(head: str, sizes: Batch, config: Any) -> dict[str, torch.Tensor]:
    """What a model with this head is trained on, on the meta device."""
    rows, text = sizes.rows, (sizes.rows, sizes.tokens)
    if head == IMAGES:
        pixels = rows, getattr(config, "num_channels", 3), config.image_size, config.image_size
        labels = torch.empty(rows, dtype=torch.long, device="meta")
        return {"pixel_values": torch.empty(pixels, dtype=torch.bfloat16, device="meta"), "labels": labels}
    labels = (rows,) if head == CLASSES else (rows, sizes.targets) if head == SEQ2SEQ else text
    shapes = {"labels": labels} if head != SPANS else {"start_positions": (rows,), "end_positions": (rows,)}
    shapes = {} if head == VECTORS else shapes
    return {
        name: torch.empty(shape, dtype=torch.long, device="meta")
        for name, shape in {"input_ids": text, **shapes}.items()
    }


def record(model: torch.nn.Module, layers: Iterable[torch.nn.Module], head: str, sizes: Batch) -> Recording:
    recording = Recording({place_of(parameter): name for name, parameter in model.named_parameters()})

    def enter(module: torch.nn.Module, *given: Any) -> None:
        recording.segment += 1

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(enter) for layer in layers]
    batch = batch_of(head, sizes, model.config)
    with torch.autograd.graph.saved_tensors_hooks(recording.keep, lambda kept: kept), recording, Fused(recording):
        out = model(**batch)
        recording.look()
        recording.stamp()
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
    made = _config_of(config).get_text_config()
    window = getattr(made, "sliding_window", None)
    if not window:
        return {**_traced(config, head, attention), "window": None, "beyond": None}
    beyond = _traced({**config, "sliding_window": SHORT}, head, attention)["trace"]
    return {**_traced({**config, "sliding_window": LONG}, head, attention), "window": window, "beyond": beyond}


def _traced(config: dict[str, Any], head: str, attention: str) -> dict[str, Any]:
    """Without a key-value cache if possible: on the meta device, some models' masks need one."""
    failed: Exception | None = None
    for how, caches in ((attention, False), (attention, True), ("eager", False), ("eager", True)):
        try:
            return _recorded(config, head, how, caches)
        except (RuntimeError, ValueError) as error:
            failed = failed or error
    assert failed is not None
    raise failed


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
    ends = [end for end, known in HEADS.items() if known == head and hasattr(transformers, f"AutoModel{end}")]
    return getattr(transformers, f"AutoModel{ends[0]}").from_config(made, **how)


def _recorded(config: dict[str, Any], head: str, attention: str, caches: bool) -> dict[str, Any]:
    made = _config_of(config)
    if getattr(made.get_text_config(), "pad_token_id", 0) is None:
        made.get_text_config().pad_token_id = 0  # classifiers of several texts ask for one
    if head == SEQ2SEQ and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    how = {"trust_remote_code": True} if "auto_map" in config else {}
    with torch.device("meta"):
        model = _built(made, head, dtype=torch.bfloat16, attn_implementation=attention, **how)
    model.config.use_cache = caches  # as the Trainer sets it; a part with a config of its own keeps its cache
    layers = layers_of(model.train())
    runs = [record(model, layers.values(), head, sizes) for sizes in points(head)]
    first = runs[0]
    if len({(len(run.facts), tuple(one["name"] for one in run.ops)) for run in runs}) > 1:
        raise ValueError("its operators differ between input lengths")
    trace = {
        "values": [[fitted([run.facts[at][0] for run in runs], head), *one[1:]] for at, one in enumerate(first.facts)],
        "ops": [{**op, "gemms": _gemms([run.ops[at]["gemms"] for run in runs], head)}
                for at, op in enumerate(first.ops)],
        "last": first.last,
        "kept": first.kept,
        "result": first.result,
    }  # fmt: skip
    return {"trace": trace, "layers": len(layers), **_facts(model, layers)}


def _facts(model: Any, layers: Iterable[str]) -> dict[str, Any]:
    text = model.config.get_text_config()
    return {
        "tensors": [
            [name, list(one.shape), next((at for at, layer in enumerate(layers) if name.startswith(f"{layer}.")), None)]
            for name, one in model.named_parameters()
        ],
        "buffers": [[name, list(one.shape), one.element_size()] for name, one in model.named_buffers()],
        "hidden_size": getattr(text, "hidden_size", None) or max(text.hidden_sizes),
        "vocab_size": getattr(text, "vocab_size", 0),
        "head_modules": heads_of(model),
    }


def _gemms(runs: list[list[list[int]]], head: str) -> list[list[list[float]]]:
    return [[fitted([run[at][side] for run in runs], head) for side in range(4)] for at in range(len(runs[0]))]


def main(write: Callable[[str], object] = print) -> int:
    config, head, attention, out = sys.argv[1:]
    try:
        found = traced(json.loads(Path(config).read_text()), head, attention)
    except Exception as error:  # without data, an architecture's modules can raise anything
        write(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return 1
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
