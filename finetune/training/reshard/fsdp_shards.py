"""Reads FSDP's checkpoints in one process, tensor by tensor: full ones, and sharded ones
(torch.distributed.checkpoint)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from finetune.errors import RequestError
from finetune.safe_read.checkpoint_files import refuse_unsafe
from finetune.training.reshard.one_file import Names
from finetune.training.reshard.portable import WEIGHT, Portable, joined, load_pickle

# accelerate 1.15 chooses these names (utils/fsdp_utils.py, save_fsdp_model and save_fsdp_optimizer).
MODEL, MODEL_PREFIX = "pytorch_model_fsdp_0", "model."
OPTIMIZER, STATE_PREFIX = "optimizer_0", "optimizer.state."
FULL_MODEL, FULL_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def find_sharded(folder: Path, prefix: str) -> dict[str, Stored]:
    """The tensors whose names begin with `prefix`, by the rest of their names. Raises RequestError if the folder's
    pickles are unsafe."""

    def read(name: str, kind: TensorStorageMetadata) -> torch.Tensor:
        state = {name: torch.empty(kind.size, dtype=kind.properties.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that it reads in a single process
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        return state[name]

    refuse_unsafe(folder / ".metadata")
    kinds = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix(prefix): Stored(kind.size, kind.properties.dtype, partial(read, name, kind))
        for name, kind in kinds.items()
        if isinstance(kind, TensorStorageMetadata) and name.startswith(prefix)
    }


def _of_tensors(found: Mapping[str, Any]) -> dict[str, Stored]:
    def stored(tensor: torch.Tensor) -> Stored:
        return Stored(tensor.shape, tensor.dtype, lambda: tensor)

    return {name: stored(tensor) for name, tensor in found.items() if torch.is_tensor(tensor)}


def read_fsdp(folder: Path, names: Names) -> Portable:
    """The groups' settings are those of the run that resumes. Raises RequestError."""
    if (folder / OPTIMIZER / ".metadata").is_file():
        stored, states = find_sharded(folder / MODEL, MODEL_PREFIX), find_sharded(folder / OPTIMIZER, STATE_PREFIX)
    else:
        stored = _of_tensors(load_pickle(folder / FULL_MODEL))
        by_name = load_pickle(folder / FULL_OPTIMIZER)["state"]
        states = _of_tensors({f"{name}.{key}": one for name, state in by_name.items() for key, one in state.items()})
    weights = {names.in_files.get(name, name): found for name, found in stored.items()}
    wanted = [name for group in names.filled for name in group.names]
    if missing := sorted(set(wanted) - set(weights)):
        raise RequestError(f"--resume: {folder} has no weight {missing[0]}. Is it a checkpoint of this model?")
    step = states.get(f"{wanted[0]}.step")

    def read(name: str, key: str) -> torch.Tensor:
        found = weights[name] if key == WEIGHT else states[f"{name}.{key}"]
        return joined([found.read()], found.shape)

    return Portable(
        shapes={name: weights[name].shape for name in wanted},
        keys=tuple(sorted({name.rpartition(".")[2] for name, found in states.items() if found.shape})),
        groups=names.filled,
        steps=None if step is None else float(step.read()),
        read=read,
        buffers={name: found.read() for name, found in weights.items() if name not in wanted},
    )
