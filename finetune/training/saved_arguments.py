"""training_args.bin as the Trainer writes it, without the home folder. Nobody reads it back: it is a record."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME

from finetune.privacy import without_home

OF_CONFIGS = ("transformers.integrations.deepspeed", "accelerate.utils.dataclasses")  # they hold the DeepSpeed config
DEEPEST = 4


def write_arguments(folder: Path, arguments: Any) -> None:
    """Over the file of the Trainer (transformers 5.23, Trainer._save), with "~" for the home folder. Its one secret,
    `hub_token`, is left out: a token is given by the environment here."""
    copied = _copied(arguments, 0)
    copied.hub_token = None
    torch.save(copied, folder / TRAINING_ARGS_NAME)


def _copied(holder: Any, level: int) -> Any:
    """A copy whose texts have no home folder, and so of the configs that it holds."""
    made = copy.copy(holder)
    for name, value in vars(holder).items():
        is_config = type(value).__module__ in OF_CONFIGS and hasattr(value, "__dict__") and level < DEEPEST
        vars(made)[name] = _copied(value, level + 1) if is_config else without_home(value)
    return made
