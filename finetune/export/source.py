"""What a checkpoint, or the folder of a run, holds: its weights by name, and what layout they were found in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune.errors import RequestError, first_line
from finetune.export.sharded import read_sharded
from finetune.export.weight import Weight
from finetune.export.zero_shards import SWAPPED, ZeroShards, has_zero_shards, of_tensor, read_zero_shards
from finetune.run.files import PIPELINE_RECORD, RUN_RECORD, STATE_FILE
from finetune.safe_read import read_json_object
from finetune.safe_read.files import open_plain
from finetune.safe_read.pickles import load_checked
from finetune.training.checkpoints.manifest import (
    CHECKPOINT,
    MANIFEST,
    checkpoints_in,
    in_short,
    problems,
    read_manifest,
)
from finetune.training.checkpoints.tag import named_tag, newest_tag

ADAPTER_CONFIG = "adapter_config.json"
SHARDED = "pytorch_model_fsdp_0"  # the folder of accelerate's sharded form


@dataclass(frozen=True)
class Source:
    """`layout` is said in words. `notes` are for the user."""

    folder: Path
    layout: str
    weights: dict[str, Weight]
    is_adapter: bool
    step: int | None
    verified: bool
    notes: list[str] = field(default_factory=list)


def read_source(folder: Path) -> Source:
    """Raises RequestError for what is no checkpoint and no finished run, and for a checkpoint that is broken."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: is no folder. Give a checkpoint, such as runs/seq_cls/checkpoint-100, or a run.")
    if wrong := problems(folder, hashes=True) if (folder / MANIFEST).is_file() else []:
        raise RequestError(
            f"{folder}: is not as its run saved it. {in_short(wrong)} `finetune checkpoint verify` finds others that "
            "are whole."
        )
    verified = (folder / MANIFEST).is_file()
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    plain = _safetensors(folder, "adapter_model" if is_adapter else "model")
    layout, weights, notes = _weights(folder, plain, is_adapter)
    if not weights:
        newest = next(iter(checkpoints_in(folder)), None)
        there = f" It has checkpoints: export {newest}." if newest else ""
        raise RequestError(f"{folder}: holds no weights that are known here.{there or ' Give a checkpoint, or a run.'}")
    if not verified and CHECKPOINT.fullmatch(folder.name):
        notes.append(f"{folder.name} has no {MANIFEST}, so what it holds could not be compared with what was saved.")
    return Source(folder, layout, weights, is_adapter, _step(folder, verified), verified, notes)


def _weights(folder: Path, plain: dict[str, Weight], is_adapter: bool) -> tuple[str, dict[str, Weight], list[str]]:
    """The layout in words, the weights, and notes. The names are those of the safetensors files, where there are any:
    the Trainer wrote them as `from_pretrained` wants them, tied weights once."""
    if (folder / PIPELINE_RECORD).is_file():
        return "pipeline, saved by the names of the whole model", plain, []
    if (tag := _tag(folder)) is not None and has_zero_shards(tag):
        shards = read_zero_shards(tag)
        layout = f"DeepSpeed ZeRO-{shards.stage} over {shards.ranks} rank(s)"
        named, notes = _by_names_of(plain, shards, is_adapter)
        return layout, named, notes
    if plain and tag is not None and (tag / SWAPPED).is_dir():
        note = "The fp32 weights are in NVMe offload's swap files, which are not read: as the safetensors have them."
        return "DeepSpeed ZeRO-3 with NVMe offload", plain, [note]
    if plain:
        return ("DeepSpeed without ZeRO" if tag else "one process, DDP or FSDP, saved whole"), plain, []
    if (folder / SHARDED / ".metadata").is_file():
        return "FSDP, saved in shards", read_sharded(folder / SHARDED), []
    return "one process or DDP, saved as pickles", _pickles(folder, is_adapter), []


def _by_names_of(plain: dict[str, Weight], shards: ZeroShards, is_adapter: bool) -> tuple[dict[str, Weight], list[str]]:
    if not plain:
        kept = {name: weight for name, weight in shards.weights.items() if name not in shards.aliases}
        return kept, []
    found, other = {}, []
    for name, weight in plain.items():
        master = _master(name, shards, is_adapter)
        if master is not None and master.shape == weight.shape:
            found[name] = master
        else:
            found[name] = weight
            other.append(name)
    notes = [f"{len(other)} weight(s), such as {other[0]}, are not in ZeRO's shards by that name and shape: as the "
             "checkpoint's safetensors have them."] if other else []  # fmt: skip
    return found, notes


def _master(name: str, shards: ZeroShards, is_adapter: bool) -> Weight | None:
    """peft leaves the adapter's own name, "default", out of the names of what it saves."""
    kind, _, last = name.rpartition(".")
    for known in (name, shards.aliases.get(name), f"{kind}.default.{last}" if is_adapter else None):
        if known in shards.weights:
            return shards.weights[known]
    return None


def _tag(folder: Path) -> Path | None:
    """DeepSpeed's folder in a checkpoint: what `latest` names, or the newest."""
    return None if _is_run(folder) else named_tag(folder) or newest_tag(folder)


def _is_run(folder: Path) -> bool:
    """Whose `latest` names a checkpoint, and not DeepSpeed's folder in one."""
    return (folder / RUN_RECORD).is_file()


def _safetensors(folder: Path, stem: str) -> dict[str, Weight]:
    """Of `stem`.safetensors, or of the files that its index names: files of this folder, and no others."""
    index = folder / f"{stem}.safetensors.index.json"
    whole = folder / f"{stem}.safetensors"
    if not index.is_file():
        return _of_file(whole) if whole.is_file() else {}
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise RequestError(f"{index}: has no weight_map of names to files.")
    if outside := [
        place for place in places.values() if Path(place).name != place or not place.endswith(".safetensors")
    ]:
        raise RequestError(f"{index}: names {outside[0][:80]!r}, which is no safetensors file beside it.")
    missing = [place for place in sorted(set(places.values())) if not (folder / place).is_file()]
    if missing:
        raise RequestError(f"{index}: names {missing[0]}, which is not there.")
    held = {place: _of_file(folder / place) for place in sorted(set(places.values()))}
    if absent := [name for name, place in places.items() if name not in held[place]]:
        raise RequestError(f"{index}: says that {places[absent[0]]} holds {absent[0]}, and it does not.")
    return {name: held[place][name] for name, place in places.items()}


def _of_file(path: Path) -> dict[str, Weight]:
    found = {}
    open_plain(path, path.parent).close()
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                part = file.get_slice(name)
                found[name] = Weight(tuple(part.get_shape()), DTYPES[part.get_dtype()], _reading(path, name))
    except (SafetensorError, OSError, KeyError) as error:
        raise RequestError(f"{path}: is no whole safetensors file ({first_line(error)}).") from error
    return found


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _reading(path: Path, name: str) -> Any:
    def read() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.clone()  # off the map of the file, which then lets go of its pages

    return read


def _pickles(folder: Path, is_adapter: bool) -> dict[str, Weight]:
    """`pytorch_model*.bin`, through the guard."""
    found: dict[str, Weight] = {}
    for path in sorted(folder.glob("adapter_model.bin" if is_adapter else "pytorch_model*.bin")):
        content = load_checked(path)
        if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
            raise RequestError(f"{path}: holds something else than tensors by their names.")
        found |= {str(name): of_tensor(tensor) for name, tensor in content.items()}
    return found


def _step(folder: Path, verified: bool) -> int | None:
    if verified:
        return read_manifest(folder).step
    if not (folder / STATE_FILE).is_file():
        return None
    step = read_json_object(folder / STATE_FILE).get("global_step")
    return step if isinstance(step, int) else None
