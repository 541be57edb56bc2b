"""The weights of a checkpoint in any format, by name and read on demand.

ZeRO's shards hold the fp32 weights, which are authoritative in bf16 and fp16 runs: the model's own weights are rounded
from them after every step. DeepSpeed's zero_to_fp32.py also reads them, but opens the shards as plain pickles, and for
ZeRO-1 and 2 joins whole groups in memory. Here they are read as by a run that resumes in another layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from finetune.errors import RequestError, first_line
from finetune.safe_read import read_json_object
from finetune.safe_read.files import open_plain
from finetune.safe_read.pickles import load_checked
from finetune.training.reshard.fsdp_shards import MODEL_PREFIX, find_sharded
from finetune.training.reshard.portable import WEIGHT, load_pickle
from finetune.training.reshard.zero_shards import experts_over, model_file, read_zero, shard_files

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
WEIGHTS_ARE_SHARDED = 3  # the ZeRO stage


@dataclass(frozen=True)
class Weight:
    """`read` returns the weight, of `shape` and `dtype`, in newly allocated memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    def bytes_in(self, dtype: torch.dtype) -> int:
        return math.prod(self.shape) * int(cast_of(self.dtype, dtype).itemsize)


def cast_of(stored: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """Floating-point weights are cast, others keep their dtype."""
    return wanted if stored.is_floating_point else stored


def of_tensor(tensor: torch.Tensor) -> Weight:
    return Weight(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().clone())


def read_safetensors(folder: Path, stem: str) -> dict[str, Weight]:
    """The weights in `stem`.safetensors, or in the files that its index names, which must be in this folder."""
    index, whole = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if not index.is_file():
        return _of_file(whole) if whole.is_file() else {}
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise RequestError(f"{index}: has no weight_map of names to files.")
    held = dict[str, dict[str, Weight]]()
    for place in sorted(set(places.values())):
        if Path(place).name != place or not place.endswith(".safetensors"):
            raise RequestError(f"{index}: names {place[:80]!r}, which is not a safetensors file in the same folder.")
        if not (folder / place).is_file():
            raise RequestError(f"{index}: names {place}, which is missing.")
        held[place] = _of_file(folder / place)
    if absent := next((name for name, place in places.items() if name not in held[place]), None):
        raise RequestError(f"{index}: says that {places[absent]} holds {absent}, but it does not.")
    return {name: held[place][name] for name, place in places.items()}


def _of_file(path: Path) -> dict[str, Weight]:
    def read(name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.clone()  # a copy, so that the mapped file's pages can be released

    open_plain(path, path.parent).close()
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is not a dict)
            return {name: Weight(tuple(part.get_shape()), DTYPES[part.get_dtype()], partial(read, name))
                    for name, part in parts.items()}  # fmt: skip
    except (SafetensorError, OSError, KeyError) as error:
        raise RequestError(f"{path}: is not a complete safetensors file ({first_line(error)}).") from error


def read_pickles(folder: Path, pattern: str) -> dict[str, Weight]:
    """The weights in files such as `pytorch_model*.bin`, opened by the safe unpickler."""
    found: dict[str, Weight] = {}
    for path in sorted(folder.glob(pattern)):
        content = load_checked(path)
        if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
            raise RequestError(f"{path}: holds something other than a dict of named tensors.")
        found |= {str(name): of_tensor(tensor) for name, tensor in content.items()}
    return found


def read_sharded(folder: Path) -> dict[str, Weight]:
    """The weights in FSDP's sharded format. Raises RequestError if the folder's pickles are unsafe."""
    found = find_sharded(folder, MODEL_PREFIX)
    return {name: Weight(tuple(one.shape), one.dtype, one.read) for name, one in found.items()}


@dataclass(frozen=True)
class ZeroShards:
    """`aliases` maps the other names of tied weights to the names under which they are stored."""

    stage: int
    ranks: int
    weights: dict[str, Weight]
    aliases: dict[str, str]


def has_zero_shards(folder: Path) -> bool:
    return any(folder.glob("*zero_pp_rank_*_optim_states.pt"))


def read_zero_shards(folder: Path) -> ZeroShards:
    """Read a `global_stepN` folder. Raises RequestError for shards that are missing or of an unsupported kind."""
    if list(folder.glob("layer_*-model_states.pt")):
        raise RequestError(
            f"{folder}: holds one file per layer of DeepSpeed's own pipeline. These recipes do not write such files, "
            "and export does not read them."
        )
    if other := next((path for path in folder.glob("*mp_rank_*_states.pt") if "mp_rank_00_" not in path.name), None):
        raise RequestError(f"{other}: is from a tensor-parallel run, which these recipes do not support.")
    if not model_file(folder).is_file():
        raise RequestError(f"{folder}: has no *_model_states.pt, which describes what the shards contain.")
    if list(folder.glob("*expert*_states.pt")) and experts_over(load_pickle(model_file(folder))) == 1:
        raise RequestError(f"{folder}: holds experts of DeepSpeed's own mixtures, which these recipes do not train.")
    try:
        return _read_zero_shards(folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = first_line(error)
        raise RequestError(f"{folder}: its shards are not as DeepSpeed 0.19 writes them ({reason}).") from error


def _read_zero_shards(folder: Path) -> ZeroShards:
    portable, places = read_zero(folder), shard_files(folder)
    stage = int(load_pickle(places[0])["optimizer_state_dict"]["zero_stage"])
    model = load_pickle(model_file(folder))
    weights = {name: of_tensor(tensor) for name, tensor in portable.buffers.items()}
    if frozen := model.get("frozen_param_shapes"):  # for example with LoRA: they have no fp32 copy
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(places))]
        parts = [load_pickle(folder / name) for name in names] if stage == WEIGHTS_ARE_SHARDED else [model]
        for name, shape in frozen.items():
            pieces = [part["frozen_param_fragments"][name].flatten() for part in parts]
            if min(shape, default=0) < 0 or sum(piece.numel() for piece in pieces) < torch.Size(shape).numel():
                raise RequestError(f"{folder}: its shards end before {name}: they are not from the same checkpoint.")
            weights[name] = Weight(tuple(shape), pieces[0].dtype, partial(_joined, pieces, torch.Size(shape)))
    for name, shape in portable.shapes.items():
        weights[name] = Weight(tuple(shape), torch.float32, partial(portable.read, name, WEIGHT))
    aliases = {str(name): str(kept) for name, kept in model.get("shared_params", {}).items()}
    return ZeroShards(stage, len(places), weights, aliases)


def _joined(pieces: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Join the pieces, dropping the padding of the last one."""
    return torch.cat(pieces)[: shape.numel()].reshape(shape)
