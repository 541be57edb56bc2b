"""A checkpoint of experts in expert parallelism, and the same with all of them in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from finetune.errors import RequestError
from finetune.models.expert_layers import layer_names, whole_names
from finetune.training.reshard.portable import Group, Portable

OF_LAYOUT = ("name", "moe")  # keys of an optimizer's group that only expert parallelism has
# Lists in the state of torch's LambdaLR and transformers' GreedyLR, one value a group.
BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "_init_lrs")


def in_order(pieces: Sequence[Any], ranks: int) -> list[Any]:
    """The pieces of experts' weights, whose first field is a rank, by expert: each of `ranks` neighbors has other
    experts, and ranks that far apart have parts of the same."""
    return sorted(pieces, key=lambda piece: (piece[0] % ranks, piece[0] // ranks))


def as_one(portable: Portable) -> Portable:
    """A checkpoint with all experts in each weight of the engine, by the model's names."""
    parts = whole_names(list(portable.shapes))
    shapes = {name: _joined_shape([portable.shapes[one] for one in of]) for name, of in parts.items()}

    def read(name: str, key: str) -> torch.Tensor:
        found = [portable.read(part, key) for part in parts[name]]
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]

    groups = tuple(Group(tuple(whole_names(group.names)), group.settings) for group in portable.groups)
    return replace(portable, shapes=shapes, read=read, groups=groups)


def _joined_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    first, *others = shapes
    return torch.Size([first[0], sum(one[1] for one in shapes), *first[2:]]) if others else first


def as_layers(portable: Portable) -> Portable:
    """The reverse of `as_one`, with all experts in each weight."""
    parts = {name: layer_names(name, portable.shapes) for name in portable.shapes}
    owner = {part: (name, place, len(of)) for name, of in parts.items() for place, part in enumerate(of)}

    def read(part: str, key: str) -> torch.Tensor:
        name, place, count = owner[part]
        found = portable.read(name, key)
        return found.chunk(count, dim=1)[place].contiguous() if count > 1 else found

    shapes = {}
    for part, (name, _, count) in owner.items():
        whole = portable.shapes[name]
        shapes[part] = torch.Size([whole[0], whole[1] // count, *whole[2:]]) if count > 1 else whole
    groups = tuple(Group(tuple(p for name in one.names for p in parts[name]), one.settings) for one in portable.groups)
    return replace(portable, shapes=shapes, read=read, groups=groups)


def regrouped(portable: Portable, groups: Sequence[Group]) -> Portable:
    """The checkpoint with its weights in the groups of the run that resumes, and the settings they were saved with."""
    saved = {name: group.settings for group in portable.groups for name in group.names}
    here = {name for group in groups for name in group.names}
    for name in sorted(here ^ saved.keys()):
        whose = "this model has, and the checkpoint" if name in here else "the checkpoint has, and this model"
        raise RequestError(f"--resume: {whose} lacks, {name}. Resume with the flags in the checkpoint's recipe.yaml.")
    kept = [Group(one.names, _plain(saved[one.names[0]])) for one in groups if one.names]
    return replace(portable, groups=tuple(kept))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in OF_LAYOUT}


def fit_schedule(schedule: dict[str, Any], groups: int) -> dict[str, Any]:
    """The state of a schedule for an optimizer with that number of groups; the Trainer's have one rate."""
    others = [key for key in BY_GROUP if schedule.get(key) and len(schedule[key]) != groups]
    return schedule | {key: [schedule[key][0]] * groups for key in others}
