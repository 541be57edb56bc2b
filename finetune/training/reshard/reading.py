"""Reads a checkpoint of any layout by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from finetune.errors import RequestError
from finetune.training.checkpoints.tag import newest_tag
from finetune.training.pipeline.checkpoint import read_record
from finetune.training.pipeline.files import find_tensors, read_tensor
from finetune.training.reshard.fsdp_shards import read_fsdp
from finetune.training.reshard.one_file import Names, read_plain, read_zero0
from finetune.training.reshard.portable import WEIGHT, Group, Portable, load_pickle
from finetune.training.reshard.sharding import Sharding
from finetune.training.reshard.zero_shards import read_zero

SCHEDULE = "scheduler.pt"


def read_any(checkpoint: Path, written: Sharding, names: Names) -> Portable:
    """Read a checkpoint with the reader for the layout that wrote it. Raises RequestError."""
    if written.engine == "pipeline":
        return read_pipeline(checkpoint, names.filled)
    if written.engine == "ddp":
        return read_plain(checkpoint, names)
    if written.engine == "fsdp":
        found = read_fsdp(checkpoint, names)
        return replace(found, groups=with_rates(found.groups, checkpoint))
    folder = newest_tag(checkpoint)
    assert folder is not None, "its layout was read from there"
    return read_zero(folder) if written.zero_stage else read_zero0(folder, names)


def with_rates(own: tuple[Group, ...], folder: Path) -> tuple[Group, ...]:
    """The run's groups at the learning rates of the checkpoint, which a schedule may have lowered for good. Both are
    the Trainer's: decayed and not decayed (pipeline/engine.py)."""
    rates = load_pickle(folder / SCHEDULE).get("_last_lr") if (folder / SCHEDULE).is_file() else None
    if not rates:
        return own
    return tuple(Group(one.names, {**one.settings, "lr": rates[min(i, len(rates) - 1)]}) for i, one in enumerate(own))


def read_pipeline(folder: Path, own: tuple[Group, ...]) -> Portable:
    """`own` are the resuming run's groups: the file's only settings are the learning rates. Raises RequestError."""
    record = read_record(folder)
    weights, states = find_tensors(folder, "model"), find_tensors(folder, "optimizer")
    wanted = [name for group in own for name in group.names]
    if missing := sorted(set(wanted) - set(weights)):
        raise RequestError(f"--resume: {folder} has no weight {missing[0]}. Is it a checkpoint of this model?")
    groups = with_rates(own, folder)

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
