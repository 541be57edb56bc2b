"""Resuming from another engine's checkpoint in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import Trainer

from finetune.training.reshard.for_trainer import settings_from
from finetune.training.reshard.move import Mover
from finetune.training.reshard.one_file import Names
from finetune.training.reshard.portable import Group
from finetune.training.reshard.sharding import Sharding, can_load_as_it_stands, sharding_of


@contextmanager
def loadable(checkpoint: Path, trainer: Any) -> Iterator[Path]:
    """Inside, a folder that a pipeline can load: the checkpoint itself, or one made of it. All ranks must call it."""
    here = Sharding("pipeline", trainer.launch.world_size)
    mover = Mover(checkpoint, Path(trainer.args.output_dir), here, trainer.launch.rank)
    mover.clear()
    written = sharding_of(checkpoint)
    if can_load_as_it_stands(written, here):
        yield checkpoint
        return
    optimizer = type(trainer.checkpoints.states.optimizer).__name__
    mover.move(written, names_of(trainer), (trainer.global_batch_size, optimizer))
    yield mover.folder
    distributed.barrier()  # all have read
    mover.clear()


def names_of(trainer: Any) -> Names:
    """As the Trainer groups the weights of the whole model, of which a rank has a stage: from the list of layers, which
    come in the model's order."""
    layers = [layer.look() for layer in trainer.parts.layers]
    decayed = set(Trainer.get_decay_parameter_names(None, torch.nn.ModuleList(layers)))
    rates: dict[str, bool] = {}
    for index, (layer, module) in enumerate(zip(trainer.parts.layers, layers, strict=True)):
        for inside, _ in module.named_parameters():
            rates.setdefault(layer.weight_name(inside), f"{index}.{inside}" in decayed)
    settings = settings_from(Trainer.get_optimizer_cls_and_kwargs(trainer.args))
    groups = [
        Group(tuple(name for name, decays in rates.items() if decays == wanted), {**settings, "weight_decay": rate})
        for wanted, rate in ((True, trainer.args.weight_decay), (False, 0.0))
    ]
    return Names(tuple(groups), {})
