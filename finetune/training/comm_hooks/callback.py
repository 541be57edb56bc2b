"""Compression in the Trainer's loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from finetune.run.flags.compression import CompressionArguments, check_freeze
from finetune.training.comm_hooks.compression import Compression
from finetune.training.comm_hooks.onebit_adam import OneBitAdam


class CommHook(TrainerCallback):
    """Registers the hook once the Trainer has wrapped the model and loaded a checkpoint, before the first step."""

    def __init__(self, trainer: Any, arguments: CompressionArguments) -> None:
        self.trainer, self.arguments = trainer, arguments
        self.compression: Compression | None = None
        steps = _planned_steps(trainer)
        check_freeze(arguments, steps, trainer.args.get_warmup_steps(steps))
        self.optimizer: tuple[Any, dict[str, Any]] | None = None  # in place of the Trainer's choice
        if arguments.ddp_comm_hook == "onebit_adam":
            self.optimizer = (OneBitAdam, trainer.get_optimizer_cls_and_kwargs(trainer.args)[1])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self.trainer.model_wrapped
        assert isinstance(model, DistributedDataParallel), f"a hook was asked for, and {type(model)} takes none"
        outer = self.trainer.optimizer  # accelerate's stands around the Trainer's
        optimizer = getattr(outer, "optimizer", outer)
        self.compression = Compression(self.arguments, model, optimizer, state.max_steps)
        resumed = self.trainer.saves.chosen
        said = self.compression.restore(resumed, state.global_step) if resumed else None
        if said and state.is_world_process_zero:
            print(said, flush=True)
        if state.is_world_process_zero:
            print(self.compression.opening_line(), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.compression:
            self.compression.end_step()

    def save(self, checkpoint: Path) -> None:
        if self.compression:
            self.compression.save(checkpoint)

    def window(self) -> dict[str, float]:
        return self.compression.window() if self.compression else {}

    def summary(self) -> dict[str, float]:
        return self.compression.summary() if self.compression else {}


def _planned_steps(trainer: Any) -> int:
    """How many steps the run will have, before the Trainer knows; of a stream --max_steps says it."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    epochs: float = trainer.args.num_train_epochs
    return math.ceil(len(trainer.train_dataset) / int(trainer.global_batch_size) * epochs)
