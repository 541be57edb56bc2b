"""The fp32 weights in DeepSpeed's ZeRO shards, a weight at a time. In runs of bf16 and fp16 they are the truth: the
model's own weights are rounded from them after every step.

DeepSpeed's zero_to_fp32.py does the same, but opens the shards as plain pickles, and for ZeRO-1 and 2 joins whole
groups in memory. The layouts are as it reads them (deepspeed 0.19, utils/zero_to_fp32.py): with ZeRO-1 and 2 the ranks'
parts of a group, one after another, are its parameters one after another; with ZeRO-3 each parameter is cut in as many
parts as there are ranks, padded at its end, and each rank has its parts one after another.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.errors import RequestError, first_line
from finetune.export.weight import Weight
from finetune.training.checkpoints.pickles import load_checked

OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
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
    return not (folder / SWAPPED).is_dir() and any(
        OPTIMIZER_FILE.fullmatch(path.name) for path in folder.glob("*_optim_states.pt")
    )


def read_zero_shards(folder: Path) -> ZeroShards:
    """Of a `global_stepN` folder. Raises RequestError for shards that are missing, or of another kind."""
    if list(folder.glob("layer_*-model_states.pt")) or list(folder.glob("*expert*_states.pt")):
        raise RequestError(
            f"{folder}: holds the layers of DeepSpeed's own pipeline, or experts of its mixture, each in a file. These "
            "recipes do not write them, and they are not read."
        )
    optimizers, models = _by_rank(folder, OPTIMIZER_FILE), _by_rank(folder, MODEL_FILE)
    if not models:
        raise RequestError(f"{folder}: has no *_model_states.pt, which says what the shards are parts of.")
    try:
        return _read(folder, optimizers, models)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RequestError(
            f"{folder}: its shards are not as DeepSpeed 0.19 writes them ({first_line(error)})."
        ) from error


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> list[Any]:
    """The content of the files of that name in the order of their ranks."""
    found = {}
    for path in folder.iterdir():
        if match := pattern.fullmatch(path.name):
            if int(match[2]) != 0:
                raise RequestError(f"{path}: is of a tensor-parallel run, which these recipes do not write.")
            found[int(match[1] or 0)] = path
    if sorted(found) != list(range(len(found))):
        raise RequestError(f"{folder}: has shards of the ranks {sorted(found)[:9]}, and between them some are missing.")
    return [load_checked(found[rank]) for rank in sorted(found)]


def _read(folder: Path, optimizers: list[Any], models: list[Any]) -> ZeroShards:
    states = [shard["optimizer_state_dict"] for shard in optimizers]
    stage = int(states[0]["zero_stage"])
    counts = states[0]["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else int(counts)
    if ranks != len(states):
        raise RequestError(f"{folder}: is of {ranks} ranks, and has shards of {len(states)}. The others are missing.")
    weights = _buffers(models[0]) | _frozen(models, stage)
    if stage < WEIGHTS_ARE_SHARDED:
        weights |= _in_groups(folder, states, models[0]["param_shapes"])
    else:
        weights |= _in_parts(folder, [state["fp32_flat_groups"] for state in states], models[0]["param_shapes"])
    aliases = {str(name): str(kept) for name, kept in models[0].get("shared_params", {}).items()}
    return ZeroShards(stage, ranks, weights, aliases)


def _buffers(model: Any) -> dict[str, Weight]:
    return {name: of_tensor(model["module"][name]) for name in model["buffer_names"] if name in model["module"]}


def of_tensor(tensor: torch.Tensor) -> Weight:
    return Weight(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().clone())


def _frozen(models: list[Any], stage: int) -> dict[str, Weight]:
    """Weights that are not trained, as under LoRA: they have no fp32 copy."""
    found = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        flat = parts if stage >= WEIGHTS_ARE_SHARDED else parts[:1]
        found[name] = _joined([part.flatten() for part in flat], tuple(shape))
    return found


def _in_groups(folder: Path, states: list[Any], groups: list[Any]) -> dict[str, Weight]:
    """ZeRO-1 and 2. After some parameters there may be a gap, for alignment."""
    found = {}
    for number, shapes in enumerate(groups):
        flats = [state["single_partition_of_fp32_groups"][number] for state in states]
        gaps = (states[0].get("param_alignment_paddings") or [[0] * len(one) for one in groups])[number]
        start = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            size = math.prod(shape)
            found[name] = _joined(_pieces(folder, name, flats, start, size), tuple(shape))
            start += size + int(gap)
    return found


def _in_parts(folder: Path, flats: list[list[torch.Tensor]], groups: list[Any]) -> dict[str, Weight]:
    """ZeRO-3. A rank's parts go on over the ends of its flat groups."""
    found, start = {}, 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        part = -(-math.prod(shape) // len(flats))
        pieces = [piece for flat in flats for piece in _pieces(folder, name, flat, start, part)]
        found[name] = _joined(pieces, tuple(shape))
        start += part
    return found


def _pieces(folder: Path, name: str, flats: list[torch.Tensor], start: int, size: int) -> list[torch.Tensor]:
    """`size` elements from `start` on of the vectors `flats`, one after another. Nothing is read yet."""
    pieces, begin = [], 0
    for flat in flats:
        low, high = max(start, begin), min(start + size, begin + flat.numel())
        if low < high:
            pieces.append(flat[low - begin : high - begin])
        begin += flat.numel()
    if sum(piece.numel() for piece in pieces) != size:
        raise RequestError(f"{folder}: its shards end before {name}: they are not of one checkpoint.")
    return pieces


def _joined(pieces: list[torch.Tensor], shape: tuple[int, ...]) -> Weight:
    """Of the pieces, one after another, as many elements as the shape has; what is over is padding."""
    size = math.prod(shape)
    dtype = pieces[0].dtype if pieces else torch.float32

    def read() -> torch.Tensor:
        flat = torch.cat(pieces) if pieces else torch.empty(0)
        return flat[:size].view(shape).clone() if flat.numel() != size else flat.view(shape)

    return Weight(shape, dtype, read)
