"""Reads and writes the pipeline's checkpoint, which already holds weights and states by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.errors import RequestError
from finetune.run.files import PIPELINE_RECORD
from finetune.training.pipeline.checkpoint import read_record
from finetune.training.pipeline.files import file_name, find_tensors, read_tensor
from finetune.training.reshard.portable import WEIGHT, Group, Portable, load_pickle
from finetune.training.run_folder import write_json


def read_pipeline(folder: Path, own: tuple[Group, ...]) -> Portable:
    """`own` are the resuming run's groups: the file's only settings are the learning rates. Raises RequestError."""
    record = read_record(folder)
    weights, states = find_tensors(folder, "model"), find_tensors(folder, "optimizer")
    wanted = [name for group in own for name in group.names]
    if missing := sorted(set(wanted) - set(weights)):
        raise RequestError(f"--resume: {folder} has no weight {missing[0]}. Is it a checkpoint of this model?")
    schedule = load_pickle(folder / "scheduler.pt")
    # Its groups are the Trainer's: decayed and not decayed (pipeline/engine.py).
    pairs = zip(own, schedule["_last_lr"], strict=False)
    groups = tuple(Group(group.names, {**group.settings, "lr": rate}) for group, rate in pairs)

    def read(name: str, key: str) -> torch.Tensor:
        found = read_tensor(weights, name) if key == WEIGHT else read_tensor(states, f"{key}:{name}")
        return found.float()

    return Portable(
        shapes={name: torch.Size(read(name, WEIGHT).shape) for name in wanted},
        keys=tuple(sorted({name.split(":", 1)[0] for name in states})),
        groups=groups,
        steps=record["optimizer_steps"],
        read=read,
        buffers={name: read_tensor(weights, name) for name in weights if name not in wanted},
        loss_scale=record["loss_scale"],
    )


def write_share(folder: Path, portable: Portable, names: list[str], rank: int, ranks: int) -> None:
    """Write one rank's part of the tensors; rank 0 also writes the buffers."""
    weights = {name: portable.read(name, WEIGHT) for name in names}
    if rank == 0:
        weights |= {name: tensor.contiguous() for name, tensor in portable.buffers.items()}
    save_file(weights, folder / file_name("model", rank, ranks), metadata={"format": "pt"})
    states = {f"{key}:{name}": portable.read(name, key) for name in names for key in portable.keys}
    save_file(states, folder / file_name("optimizer", rank, ranks))


def write_pipeline_record(folder: Path, portable: Portable, global_batch_size: int, optimizer: str) -> None:
    """`stages` and `pipelines` are null, because the folder has no layout's random states."""
    record: dict[str, Any] = {
        "stages": None,
        "pipelines": None,
        "global_batch_size": global_batch_size,
        "optimizer": optimizer,
        "optimizer_steps": portable.steps,
        "loss_scale": dict(portable.loss_scale),
    }
    write_json(folder / PIPELINE_RECORD, record)
