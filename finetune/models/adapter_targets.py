"""Which layers of a model get an adapter: linear layers by name, and the fused tensors of experts if they are named."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from finetune.errors import RequestError
from finetune.models.experts import mixture_of
from finetune.run.flags.adapter import AdapterArguments

MAX_SHOWN = 20
ALL_LINEAR = "all-linear"  # peft's word
# In a mixture, peft 0.21 takes these names, and all-linear, for tensors of the experts and routers, into which
# transformers 5 fused the linear layers of that name (utils/transformers_weight_conversion.py,
# _MOE_TARGET_MODULE_MAPPING); linear layers that still have the name would lose their adapter.
TAKEN_BY_PEFT = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def targets_of(model: Any, arguments: AdapterArguments) -> tuple[list[str] | str, list[str]]:
    """peft's `target_modules` and `target_parameters`. Raises RequestError for a name that the model does not have, and
    for flags that adapters of experts do not support."""
    wanted, tensors = arguments.lora_target_modules, expert_tensors(model)
    layers = {name: part for name, part in model.named_modules() if is_linear(part) or isinstance(part, nn.Embedding)}
    if wanted in (None, [ALL_LINEAR]):
        return (_linear_names(model) if tensors else ALL_LINEAR), []
    experts = sorted({_short(full) for full in tensors for name in wanted or () if matches(full, name)})
    rest = [name for name in wanted or () if not any(matches(full, name) for full in tensors)]
    missing = [name for name in rest if not any(matches(layer, name) for layer in layers)]
    taken = [name for name in rest if tensors and name.rpartition(".")[2] in TAKEN_BY_PEFT]
    if missing or taken:
        why = "no linear layer has this name" if missing else "peft takes this name for a part of the experts' tensors"
        raise RequestError(f"--lora_target_modules {(missing or taken)[0]}: {why}. The model has: {_known(model)}.")
    for name, value in (("lora_dropout", arguments.lora_dropout), ("lora_use_dora", arguments.lora_use_dora)):
        if experts and value:
            raise RequestError(
                f"--{name} {value}: peft has no such adapter for experts ({', '.join(experts)}). Drop it, or the "
                "experts from --lora_target_modules."
            )
    return rest, experts


def expert_tensors(model: Any) -> list[str]:
    """The full names of the tensors (experts, ...) that hold the matrices of experts."""
    mixture = mixture_of(model)
    found = mixture.modules.items() if mixture else ()
    return [
        f"{place}.{name}"
        for place, module in found
        for name, tensor in module.named_parameters(recurse=False)
        if len(getattr(tensor, "ds_shape", tensor.shape)) == 3
    ]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's


def matches(full: str, wanted: str) -> bool:
    return full == wanted or full.endswith(f".{wanted}")


def _linear_names(model: Any) -> list[str]:
    """What all-linear means in a mixture: linear layers, without the head and those that peft takes for experts."""
    found = {name.rpartition(".")[2] for name, part in model.named_modules() if is_linear(part) and "." in name}
    return sorted(found - set(TAKEN_BY_PEFT))


def _known(model: Any) -> str:
    linear = Counter(name.rpartition(".")[2] for name, module in model.named_modules() if is_linear(module))
    there = ", ".join(f"{name} ({count})" for name, count in linear.most_common(MAX_SHOWN))
    experts = ", ".join(dict.fromkeys(map(_short, expert_tensors(model))))
    return f"{there}; of experts: {experts}" if experts else there


def _short(full: str) -> str:
    """model.layers.0.mlp.experts.down_proj as experts.down_proj."""
    return ".".join(full.split(".")[-2:])
