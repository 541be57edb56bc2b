"""Reads and writes checkpoints that keep all states in one file: the Trainer's without DeepSpeed, and ZeRO-0's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
from finetune.training.reshard.zero_shards import engine_record, model_file


@dataclass(frozen=True)
class Names:
    """The resuming run's optimizer groups, with its settings, and a map from a tied weight's other names to the one
    used; `spread` are the groups if experts have some of their own."""

    groups: tuple[Group, ...]
    tied: Mapping[str, str]
    spread: tuple[Group, ...] | None = None

    @property
    def filled(self) -> tuple[Group, ...]:
        """The groups that have weights; DeepSpeed drops empty ones (runtime/engine.py, _configure_optimizer)."""
        return tuple(group for group in self.groups if group.names)


def read_plain(folder: Path, names: Names) -> Portable:
    """A checkpoint of the Trainer without DeepSpeed: optimizer.pt and model*.safetensors. Raises RequestError."""
    stored = find_tensors(folder, "model")
    if not stored:
        raise RequestError(
            f"--resume: {folder} has no model.safetensors (LoRA adapters cannot be moved to another engine). Resume "
            "with the engine and the number of ranks that wrote it."
        )
    held = {names.tied.get(name, name): name for name in stored}  # the file has one name of each tied weight

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


def write_plain(folder: Path, portable: Portable, names: Names) -> None:
    """Write model.safetensors in fp32 and optimizer.pt, as the Trainer reads them."""
    weights = {name: portable.read(name, WEIGHT) for name in portable.shapes}
    save_file(
        weights | {k: v.contiguous() for k, v in portable.buffers.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    record = _optimizer_record(portable)
    filled = iter(record["param_groups"])
    record["param_groups"] = [next(filled) if g.names else {**g.settings, "params": []} for g in names.groups]
    torch.save(record, folder / "optimizer.pt")


def write_zero0(folder: Path, portable: Portable, world_size: int, is_fp32: bool) -> None:
    """Write `global_stepN/` and the file that tells the engine its name. In fp16 and bf16 the optimizer holds the fp32
    weights (runtime/fp16/unfused_optimizer.py, load_state_dict)."""
    module = {name: portable.read(name, WEIGHT) for name in portable.shapes}
    optimizer = _optimizer_record(portable)
    if not is_fp32:
        optimizer = {
            "cur_scale": 1.0,
            "cur_iter": int(portable.steps or 0),
            **portable.loss_scale,
            "dynamic_loss_scale": "scale_window" in portable.loss_scale,
            "optimizer_state_dict": optimizer,
            "fp32_groups": [[module[name] for name in group.names] for group in portable.groups],
        }
    record = engine_record(portable, world_size)
    torch.save({**record, "module": {**module, **portable.buffers}, "optimizer": optimizer}, model_file(folder))
    (folder.parent / "latest").write_text(folder.name, encoding="utf-8")


def _optimizer_record(portable: Portable) -> dict[str, Any]:
    """A `state_dict` like those of torch's optimizers."""
    names = [name for group in portable.groups for name in group.names]
    index = {name: number for number, name in enumerate(names)}
    states = {index[name]: {key: portable.read(name, key) for key in portable.keys} for name in names}
    if portable.steps is not None:
        for state in states.values():
            state["step"] = torch.tensor(portable.steps)
    groups = [{**group.settings, "params": [index[name] for name in group.names]} for group in portable.groups]
    return {"state": states, "param_groups": groups}
