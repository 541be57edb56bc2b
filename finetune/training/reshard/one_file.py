"""Reads checkpoints that keep all states in one file: the Trainer's without DeepSpeed, and ZeRO-0's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finetune.errors import RequestError
from finetune.training.pipeline.files import find_tensors, read_tensor
from finetune.training.reshard.portable import (
    COUNTERS,
    WEIGHT,
    Group,
    Portable,
    joined,
    load_pickle,
    settings_of,
    state_keys,
    steps_of,
)
from finetune.training.reshard.zero_shards import model_file


@dataclass(frozen=True)
class Names:
    """The resuming run's optimizer groups, with its settings, and a map from names in files (a tied weight's other
    names, and those in an adapter) to the model's; `expert_groups` are the groups if experts have some of their own."""

    groups: tuple[Group, ...]
    in_files: Mapping[str, str]
    expert_groups: tuple[Group, ...] | None = None

    @property
    def filled(self) -> tuple[Group, ...]:
        """The groups that have weights; DeepSpeed drops empty ones (runtime/engine.py, _configure_optimizer)."""
        return tuple(group for group in self.groups if group.names)


def read_plain(folder: Path, names: Names) -> Portable:
    """A checkpoint of the Trainer without DeepSpeed: optimizer.pt, and model*.safetensors or an adapter's file. Raises
    RequestError."""
    stored = find_tensors(folder, "model") or find_tensors(folder, "adapter_model")
    if not stored:
        raise RequestError(
            f"--resume: {folder} has no model.safetensors. Resume with the engine and the number of ranks that wrote "
            "it."
        )
    held = {names.in_files.get(name, name): name for name in stored}  # the file has one name of each tied weight

    def weight(name: str) -> torch.Tensor:
        return read_tensor(stored, held[name])

    known = {name for group in names.filled for name in group.names}
    buffers = {name: weight(name) for name in held if name not in known}
    return replace(_whole(folder, names, load_pickle(folder / "optimizer.pt"), weight, set(held)), buffers=buffers)


def read_zero0(folder: Path, names: Names) -> Portable:
    """Read `global_stepN/` without ZeRO: one file. In bf16 the optimizer holds the fp32 weights (deepspeed/runtime/
    fp16/unfused_optimizer.py)."""
    record = load_pickle(model_file(folder))
    module, optimizer = record["module"], record["optimizer"]
    if "fp32_groups_flat" in optimizer:
        raise RequestError(
            f"{folder}: states of DeepSpeed's fused optimizer without ZeRO cannot be moved. Resume in the same layout."
        )
    masters: dict[str, torch.Tensor] = {}
    for group, tensors in zip(names.filled, optimizer.get("fp32_groups", ()), strict=False):
        masters |= dict(zip(group.names, tensors, strict=True))
    counters = {name: record[name] for name in COUNTERS}
    scale = {k: v for k, v in optimizer.items() if k != "dynamic_loss_scale" and isinstance(v, int | float)}
    buffers = {name: module[name] for name in record["buffer_names"]}
    states = optimizer.get("optimizer_state_dict", optimizer)

    def weight(name: str) -> torch.Tensor:
        found: torch.Tensor = masters[name] if name in masters else module[name]
        return found

    whole = _whole(folder, names, states, weight, set(module))
    return replace(whole, buffers=buffers, loss_scale=scale, counters=counters, schedule=record["lr_scheduler"])


def _whole(
    folder: Path, names: Names, optimizer: Mapping[str, Any], weight: Callable[[str], torch.Tensor], there: set[str]
) -> Portable:
    """Only weights and states; `there` are the names that `weight` knows."""
    states, given = optimizer["state"], [group for group in optimizer["param_groups"] if group["params"]]
    if [len(group["params"]) for group in given] != [len(group.names) for group in names.filled]:
        raise RequestError(
            f"--resume: {folder} holds the states of {[len(g['params']) for g in given]} weights in the optimizer's "
            f"groups, but this model has {[len(g.names) for g in names.filled]}. Resume with the flags in its "
            "recipe.yaml."
        )
    index = {
        name: number
        for group, own in zip(given, names.filled, strict=True)
        for number, name in zip(group["params"], own.names, strict=True)
    }
    if missing := sorted(set(index) - there):
        raise RequestError(f"--resume: {folder} has no weight {missing[0]}. Is it a checkpoint of this model?")
    shapes = {name: torch.Size(weight(name).shape) for name in index}
    keys = state_keys(states[min(states)]) if states else ()

    def read(name: str, key: str) -> torch.Tensor:
        found = weight(name) if key == WEIGHT else states[index[name]][key]
        if found.shape != shapes[name]:
            raise RequestError(
                f"--resume: {folder}: {key} of {name} is {tuple(found.shape)}, not {tuple(shapes[name])}."
            )
        return joined([found], shapes[name])

    groups = tuple(Group(own.names, settings_of(group)) for own, group in zip(names.filled, given, strict=True))
    return Portable(shapes, keys, groups, steps_of(states, given), read)
