"""Reads the shards of ZeRO-1, 2 and 3: flat tensors, each holding a rank's part of a group's concatenated weights.
With NVMe offload, the larger ones are in swap files beside the shards."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from finetune.dsconfig.config import Config
from finetune.errors import RequestError, first_line
from finetune.models.expert_layers import EXPERT_WEIGHT
from finetune.safe_read.files import open_plain
from finetune.training.reshard.expert_shards import as_one, in_order
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

RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
SWAP_FILE = re.compile(r"(\w+-)?\d+_\d+", re.ASCII)
SWAP_DTYPE = torch.float32
Piece = tuple[int, int, int, int]  # rank, group, and the place in its flat tensor: first element, number of elements
Places = tuple[tuple[Group, ...], dict[str, list[Piece]]]


def shard_files(folder: Path) -> list[Path]:
    """The optimizer shards in `global_stepN/`, in rank order. Raises RequestError if one is missing."""
    found = {int(m[1]): path for path in folder.glob("*_optim_states.pt") if (m := RANK.search(path.name))}
    if sorted(found) != list(range(len(found))):
        missing = min(set(range(max(found) + 1)) - set(found))
        raise RequestError(f"{folder}: has {len(found)} shards, but none for rank {missing}.")
    return [found[rank] for rank in range(len(found))]


def model_file(folder: Path) -> Path:
    """The file in `global_stepN/` that holds everything but the optimizer's state; under ZeRO-3, rank 0's."""
    third = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    return third if third.is_file() else folder / "mp_rank_00_model_states.pt"


def experts_over(record: Mapping[str, Any]) -> int:
    """How many ranks hold a mixture's experts together, according to the file that `model_file` names."""
    return Config(record.get("ds_config")).count("expert_parallel.autoep_size") or 1


def read_zero(folder: Path) -> Portable:
    """Read the shards in `global_stepN/`. Raises RequestError."""
    try:
        return _read(folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise RequestError(f"{folder}: its shards are not as DeepSpeed 0.19 writes them ({reason}).") from error


def _read(folder: Path) -> Portable:
    shards = [load_pickle(path)["optimizer_state_dict"] for path in shard_files(folder)]
    counts = shards[0]["partition_count"]  # under ZeRO-1 and 2, one count per group
    ranks = max(counts) if isinstance(counts, list) else int(counts)
    if len(shards) != ranks:
        raise RequestError(f"{folder}: was written by {ranks} ranks, but has the shards of {len(shards)}.")
    record, is_third = load_pickle(model_file(folder)), "fp32_flat_groups" in shards[0]
    given, states = record["param_shapes"], _states(shards[0])
    shapes = {name: torch.Size(shape) for group in given for name, shape in group.items()}
    groups, pieces = (_third_stage if is_third else _first_stages)(shards, given, shapes)
    expert_ranks = experts_over(record)
    for name in filter(EXPERT_WEIGHT.search, shapes if expert_ranks > 1 else ()):
        pieces[name] = in_order(pieces[name], expert_ranks)
        shapes[name] = torch.Size([shapes[name][0] * expert_ranks, *shapes[name][1:]])
    weights = "fp32_flat_groups" if is_third else "single_partition_of_fp32_groups"

    def flat(rank: int, group: int, key: str) -> torch.Tensor:
        shard = shards[rank]
        found = torch.as_tensor(shard[weights][group] if key == WEIGHT else _states(shard)["state"][group][key])
        return _swapped(folder, rank, found.ds_id) if hasattr(found, "ds_id") and not found.numel() else found

    def tensor(name: str, key: str) -> torch.Tensor:
        try:
            parts = [flat(rank, group, key).narrow(0, at, n) for rank, group, at, n in pieces[name]]
            return joined(parts, shapes[name])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = f"its shards do not hold all of {key} of {name} ({first_line(error)})"
            raise RequestError(f"{folder}: {reason}. They are not from the same checkpoint.") from error

    scaler = shards[0].get("loss_scaler")
    found = Portable(
        shapes=shapes,
        keys=state_keys(states["state"][0]) if states["state"] else (),
        groups=groups,
        steps=steps_of(states["state"], states["param_groups"]),
        read=tensor,
        buffers={name: record["module"][name] for name in record["buffer_names"]},
        loss_scale={} if scaler is None else {k: v for k, v in vars(scaler).items() if isinstance(v, int | float)},
        counters={name: record[name] for name in COUNTERS},
        schedule=record["lr_scheduler"],
    )
    return as_one(found) if expert_ranks > 1 else found


def _swapped(folder: Path, rank: int, name: str) -> torch.Tensor:
    """A flat tensor that NVMe offload has swapped out, mapped into memory; it ends with padding. The empty tensor that
    it leaves behind, and torch.save with it, has its name (deepspeed/runtime/swap_tensor/optimizer_utils.py,
    SwapTensorContext; runtime/engine.py, save_checkpoint). Raises RequestError."""
    if not SWAP_FILE.fullmatch(name):
        raise RequestError(f"{folder}: {name[:60]!r} is not the name of a swap file.")
    path = folder / "offloaded_tensors" / f"rank{rank:02d}" / f"{name}.tensor.swp"
    with open_plain(path, inside=folder) as file:
        size = os.fstat(file.fileno()).st_size
    return torch.from_file(str(path), size=size // SWAP_DTYPE.itemsize, dtype=SWAP_DTYPE)


def _states(shard: Mapping[str, Any]) -> dict[str, Any]:
    """The inner torch optimizer's `state_dict`; each of its parameters is a flat tensor."""
    states = shard["optimizer_state_dict" if "fp32_flat_groups" in shard else "base_optimizer_state"]
    if not isinstance(states, dict):
        raise RequestError("the checkpoint is elastic (zero_optimization.elastic_checkpoint), which is not supported.")
    return states


def _first_stages(shards: list[Any], given: list[Any], shapes: Mapping[str, torch.Size]) -> Places:
    """ZeRO-1 and 2: one flat tensor per group, split between ranks at any element
    (deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py)."""
    settings = _states(shards[0])["param_groups"]
    groups = tuple(Group(tuple(names), settings_of(group)) for names, group in zip(given, settings, strict=True))
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for rank, shard in enumerate(shards):
        for group, mapping in enumerate(shard["param_slice_mappings"]):
            for name, place in mapping.items():
                pieces[name].append((rank, group, place.start, place.numel))
    return groups, pieces


def _third_stage(shards: list[Any], given: list[Any], shapes: Mapping[str, torch.Size]) -> Places:
    """ZeRO-3: one flat tensor per sub-group, with an equal part of every weight on each rank, padded on the last one
    (deepspeed/runtime/zero/partition_parameters.py). `given` are the shapes of each sub-group."""
    settings = _states(shards[0])["param_groups"]  # their parameters are the sub-groups
    groups = tuple(
        Group(tuple(n for sub in group["params"] for n in given[sub]), settings_of(group)) for group in settings
    )
    pieces: dict[str, list[Piece]] = {}
    for sub_group, names in enumerate(given):
        at = 0
        for name in names:
            size = shapes[name].numel()
            part = -(-size // len(shards))
            lengths = (max(0, min(part, size - rank * part)) for rank in range(len(shards)))
            pieces[name] = [(rank, sub_group, at, length) for rank, length in enumerate(lengths)]
            at += part
    return groups, pieces
