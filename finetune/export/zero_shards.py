"""The fp32 weights in DeepSpeed's ZeRO shards, a weight at a time. In runs of bf16 and fp16 they are the truth: the
model's own weights are rounded from them after every step.

DeepSpeed's zero_to_fp32.py does the same, but opens the shards as plain pickles, and for ZeRO-1 and 2 joins whole
groups in memory. The shards are read as a run reads them that goes on in another layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from finetune.errors import RequestError, first_line
from finetune.export.weight import Weight
from finetune.training.reshard.portable import WEIGHT, load_pickle
from finetune.training.reshard.zero_shards import model_file, read_zero, shard_files

SWAPPED = "offloaded_tensors"
WEIGHTS_ARE_SHARDED = 3  # the ZeRO stage


@dataclass(frozen=True)
class ZeroShards:
    """`aliases` are names of weights that others' names have already (tied weights)."""

    stage: int
    ranks: int
    weights: dict[str, Weight]
    aliases: dict[str, str]


def has_zero_shards(folder: Path) -> bool:
    """False where NVMe offload has left them in swap files, which do not say what they hold."""
    return not (folder / SWAPPED).is_dir() and any(folder.glob("*zero_pp_rank_*_optim_states.pt"))


def read_zero_shards(folder: Path) -> ZeroShards:
    """Of a `global_stepN` folder. Raises RequestError for shards that are missing, or of another kind."""
    if list(folder.glob("layer_*-model_states.pt")) or list(folder.glob("*expert*_states.pt")):
        raise RequestError(
            f"{folder}: holds the layers of DeepSpeed's own pipeline, or experts of its mixture, each in a file. These "
            "recipes do not write them, and they are not read."
        )
    if other := next((path for path in folder.glob("*mp_rank_*_states.pt") if "mp_rank_00_" not in path.name), None):
        raise RequestError(f"{other}: is of a tensor-parallel run, which these recipes do not write.")
    if not model_file(folder).is_file():
        raise RequestError(f"{folder}: has no *_model_states.pt, which says what the shards are parts of.")
    try:
        return _read(folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RequestError(
            f"{folder}: its shards are not as DeepSpeed 0.19 writes them ({first_line(error)})."
        ) from error


def _read(folder: Path) -> ZeroShards:
    portable, places = read_zero(folder), shard_files(folder)
    stage = int(load_pickle(places[0])["optimizer_state_dict"]["zero_stage"])
    model = load_pickle(model_file(folder))
    weights = {name: of_tensor(tensor) for name, tensor in portable.buffers.items()}
    if frozen := model.get("frozen_param_shapes"):  # as under LoRA: they have no fp32 copy
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(places))]
        parts = [load_pickle(folder / name) for name in names] if stage == WEIGHTS_ARE_SHARDED else [model]
        for name, shape in frozen.items():
            pieces = [part["frozen_param_fragments"][name].flatten() for part in parts]
            if min(shape, default=0) < 0 or sum(piece.numel() for piece in pieces) < torch.Size(shape).numel():
                raise RequestError(f"{folder}: its shards end before {name}: they are not of one checkpoint.")
            weights[name] = Weight(tuple(shape), pieces[0].dtype, partial(_joined, pieces, torch.Size(shape)))
    for name, shape in portable.shapes.items():
        weights[name] = Weight(tuple(shape), torch.float32, partial(portable.read, name, WEIGHT))
    aliases = {str(name): str(kept) for name, kept in model.get("shared_params", {}).items()}
    return ZeroShards(stage, len(places), weights, aliases)


def _joined(pieces: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The last piece is filled up to the others' size."""
    return torch.cat(pieces)[: shape.numel()].reshape(shape)


def of_tensor(tensor: torch.Tensor) -> Weight:
    return Weight(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().clone())
