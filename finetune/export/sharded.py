"""The weights of a sharded checkpoint of FSDP (torch.distributed.checkpoint), a weight at a time and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from finetune.export.weight import Weight
from finetune.safe_read.pickles import refuse_unsafe

PREFIX = "model."  # under which accelerate saves them (accelerate 1.15, utils/fsdp_utils.py, save_fsdp_model)


def read_sharded(folder: Path) -> dict[str, Weight]:
    """Raises RequestError where the folder's pickles ask for more than they may."""
    refuse_unsafe(folder / ".metadata")
    reader = FileSystemReader(folder)
    kinds = reader.read_metadata().state_dict_metadata
    return {
        name.removeprefix(PREFIX): Weight(tuple(kind.size), kind.properties.dtype, _reading(folder, name, kind))
        for name, kind in kinds.items()
        if isinstance(kind, TensorStorageMetadata) and not name.startswith("optim.")
    }


def _reading(folder: Path, name: str, kind: Any) -> Any:
    def read() -> torch.Tensor:
        state = {name: torch.empty(kind.size, dtype=kind.properties.dtype)}
        load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        return state[name]

    return read
