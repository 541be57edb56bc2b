"""Reads the shards of ZeRO-1, 2 and 3: flat tensors, each rank's part of all weights of a group from end to end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from finetune.errors import RequestError, first_line
from finetune.training.reshard.portable import (
    WEIGHT,
    Group,
    Portable,
    joined,
    load_pickle,
    settings_of,
    state_keys,
    steps_of,
)

RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
Piece = tuple[int, int, int, int]  # rank, group, and where in its flat tensor: first element and number


def shard_files(folder: Path) -> list[Path]:
    """The optimizer's shards in `global_stepN/`, rank by rank. Raises RequestError where one is missing."""
    found = {int(m[1]): path for path in folder.glob("*_optim_states.pt") if (m := RANK.search(path.name))}
    if sorted(found) != list(range(len(found))):
        missing = min(set(range(max(found) + 1)) - set(found))
        raise RequestError(f"{folder}: has {len(found)} shards, but none of rank {missing}.")
    return [found[rank] for rank in range(len(found))]


def model_file(folder: Path) -> Path:
    """The file of `global_stepN/` that holds what is no optimizer's: of ZeRO-3 that of rank 0."""
    third = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    return third if third.is_file() else folder / "mp_rank_00_model_states.pt"


def read_zero(folder: Path) -> Portable:
    """Of `global_stepN/`. Raises RequestError."""
    try:
        return _read(folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise RequestError(f"{folder}: its shards are not as DeepSpeed 0.19 writes them ({reason}).") from error


def _read(folder: Path) -> Portable:
    shards = [load_pickle(path)["optimizer_state_dict"] for path in shard_files(folder)]
    if len(shards) != (ranks := _ranks(shards[0]["partition_count"])):
        raise RequestError(f"{folder}: is of {ranks} ranks, and has shards of {len(shards)}. The others are missing.")
    record = load_pickle(model_file(folder))
    read = _third_stage if "fp32_flat_groups" in shards[0] else _first_stages
    shapes, groups, flat, pieces = read(shards, record["param_shapes"])
    states = _states(shards[0])

    def tensor(name: str, key: str) -> torch.Tensor:
        try:
            return joined(
                [flat(rank, group, key).narrow(0, at, n) for rank, group, at, n in pieces[name]], shapes[name]
            )
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = f"its shards do not hold {key} of {name} whole ({first_line(error)})"
            raise RequestError(f"{folder}: {reason}. They are not of one checkpoint.") from error

    scaler = shards[0].get("loss_scaler")
    return Portable(
        shapes=shapes,
        keys=state_keys(states["state"][0]) if states["state"] else (),
        groups=groups,
        steps=steps_of(states["state"], states["param_groups"]),
        read=tensor,
        buffers={name: record["module"][name] for name in record["buffer_names"]},
        loss_scale={} if scaler is None else {k: v for k, v in vars(scaler).items() if isinstance(v, int | float)},
        counters={name: record[name] for name in ("global_steps", "skipped_steps", "global_samples")},
        schedule=record["lr_scheduler"],
    )


def _ranks(counts: list[int] | int) -> int:
    """ZeRO-1 and 2 say it of each group."""
    return max(counts) if isinstance(counts, list) else int(counts)


def _states(shard: Mapping[str, Any]) -> dict[str, Any]:
    """The `state_dict` of torch's optimizer inside; each of its parameters is a flat tensor."""
    states = shard["optimizer_state_dict" if "fp32_flat_groups" in shard else "base_optimizer_state"]
    if not isinstance(states, dict):
        raise RequestError("the checkpoint is elastic (zero_optimization.elastic_checkpoint), and is not read here.")
    return states


def _first_stages(shards: list[Any], given: list[Any]) -> tuple[Any, ...]:
    """ZeRO-1 and 2: a flat tensor a group, cut between the ranks anywhere (deepspeed/runtime/zero/stage_1_and_2.py,
    and bf16_optimizer.py)."""
    shapes = {name: torch.Size(shape) for group in given for name, shape in group.items()}
    settings = _states(shards[0])["param_groups"]
    groups = tuple(Group(tuple(names), settings_of(group)) for names, group in zip(given, settings, strict=True))
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for rank, shard in enumerate(shards):
        for group, mapping in enumerate(shard["param_slice_mappings"]):
            for name, place in mapping.items():
                pieces[name].append((rank, group, place.start, place.numel))

    def flat(rank: int, group: int, key: str) -> torch.Tensor:
        shard = shards[rank]
        found = (
            shard["single_partition_of_fp32_groups"][group] if key == WEIGHT else _states(shard)["state"][group][key]
        )
        return torch.as_tensor(found)

    return shapes, groups, flat, pieces


def _third_stage(shards: list[Any], given: list[Any]) -> tuple[Any, ...]:
    """ZeRO-3: a flat tensor a sub-group, of every weight an equal part a rank, filled up at the last one
    (deepspeed/runtime/zero/partition_parameters.py). `given` are the shapes of each sub-group."""
    shapes = {name: torch.Size(shape) for group in given for name, shape in group.items()}
    groups = []
    for group in _states(shards[0])["param_groups"]:  # its parameters are the sub-groups
        names = tuple(name for sub_group in group["params"] for name in given[sub_group])
        groups.append(Group(names, settings_of(group)))
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for sub_group, names in enumerate(given):
        at = 0
        for name in names:
            size = shapes[name].numel()
            part = -(-size // len(shards))
            for rank in range(len(shards)):
                pieces[name].append((rank, sub_group, at, max(0, min(part, size - rank * part))))
            at += part

    def flat(rank: int, sub_group: int, key: str) -> torch.Tensor:
        shard = shards[rank]
        found = shard["fp32_flat_groups"][sub_group] if key == WEIGHT else _states(shard)["state"][sub_group][key]
        return torch.as_tensor(found)

    return shapes, tuple(groups), flat, pieces
