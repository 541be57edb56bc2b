"""What a checkpoint or a run folder holds: its weights by name, and the layout they were saved in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RequestError
from finetune.export.request import check_folder
from finetune.export.weights import (
    Weight,
    ZeroShards,
    has_zero_shards,
    read_pickles,
    read_safetensors,
    read_sharded,
    read_zero_shards,
)
from finetune.run.files import ADAPTER_CONFIG, PIPELINE_RECORD, RUN_RECORD, STATE_FILE
from finetune.safe_read import read_json_object
from finetune.training.checkpoints.manifest import (
    CHECKPOINT,
    MANIFEST,
    checkpoints_in,
    in_short,
    problems,
    read_manifest,
)
from finetune.training.checkpoints.tag import named_tag, newest_tag

SHARDED = "pytorch_model_fsdp_0"  # the folder of accelerate's sharded format


@dataclass(frozen=True)
class Source:
    """`layout` is a description in words. `notes` are for the user."""

    folder: Path
    layout: str
    weights: dict[str, Weight]
    is_adapter: bool
    step: int | None
    verified: bool
    notes: list[str]


def read_source(folder: Path) -> Source:
    """Raises RequestError for anything but a checkpoint or a finished run, and for a damaged checkpoint."""
    check_folder(folder)
    verified = (folder / MANIFEST).is_file()
    if wrong := problems(folder, hashes=True) if verified else []:
        raise RequestError(
            f"{folder}: does not verify. {in_short(wrong)} `finetune checkpoint verify` finds checkpoints that do."
        )
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    plain = read_safetensors(folder, "adapter_model" if is_adapter else "model")
    layout, weights, notes = _weights(folder, plain, is_adapter)
    if not weights:
        newest = next(iter(checkpoints_in(folder)), None)
        there = f" It has checkpoints: export {newest}." if newest else ""
        raise RequestError(f"{folder}: holds no weights in a known format.{there or ' Give a checkpoint, or a run.'}")
    if not verified and CHECKPOINT.fullmatch(folder.name):
        notes.append(f"{folder.name} has no {MANIFEST}, so it could not be verified.")
    return Source(folder, layout, weights, is_adapter, _step(folder, verified), verified, notes)


def _weights(folder: Path, plain: dict[str, Weight], is_adapter: bool) -> tuple[str, dict[str, Weight], list[str]]:
    """The layout in words, the weights, and notes. If there are safetensors files, their names are used: the Trainer
    wrote them as `from_pretrained` expects them, with tied weights once."""
    if (folder / PIPELINE_RECORD).is_file():
        return "pipeline, saved under the names of the whole model", plain, []
    # A run's `latest` names a checkpoint, not DeepSpeed's folder in one.
    tag = None if (folder / RUN_RECORD).is_file() else named_tag(folder) or newest_tag(folder)
    if tag is not None and has_zero_shards(tag):
        shards = read_zero_shards(tag)
        return f"DeepSpeed ZeRO-{shards.stage} over {shards.ranks} rank(s)", *_by_names_of(plain, shards, is_adapter)
    if plain:
        return ("DeepSpeed without ZeRO" if tag else "safetensors with whole weights"), plain, []
    if (folder / SHARDED / ".metadata").is_file():
        return "FSDP, saved in shards", read_sharded(folder / SHARDED), []
    pickles = read_pickles(folder, "adapter_model.bin" if is_adapter else "pytorch_model*.bin")
    return "one process or DDP, saved as pickles", pickles, []


def _by_names_of(plain: dict[str, Weight], shards: ZeroShards, is_adapter: bool) -> tuple[dict[str, Weight], list[str]]:
    if not plain:
        return {name: weight for name, weight in shards.weights.items() if name not in shards.aliases}, []
    found, other = {}, []
    for name, weight in plain.items():
        master = _master(name, shards, is_adapter)
        if master is not None and master.shape == weight.shape:
            found[name] = master
        else:
            found[name] = weight
            other.append(name)
    notes = [f"{len(other)} weight(s), such as {other[0]}, are not in ZeRO's shards by that name and shape: they come "
             "from the checkpoint's safetensors."] if other else []  # fmt: skip
    return found, notes


def _master(name: str, shards: ZeroShards, is_adapter: bool) -> Weight | None:
    """The fp32 weight in the shards. peft omits the adapter's name, "default", from the names that it saves."""
    kind, _, last = name.rpartition(".")
    names = (name, shards.aliases.get(name), f"{kind}.default.{last}" if is_adapter else None)
    return next((shards.weights[known] for known in names if known in shards.weights), None)


def _step(folder: Path, verified: bool) -> int | None:
    if verified:
        return read_manifest(folder).step
    if not (folder / STATE_FILE).is_file():
        return None
    step = read_json_object(folder / STATE_FILE).get("global_step")
    return step if isinstance(step, int) else None
