"""The NaN guard's interface to the Hugging Face Trainer, with and without DeepSpeed and FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from finetune.training.guards.finder import Finder, FoundLoss, odd_inputs
from finetune.training.guards.nan_guard import Finding, Suspect
from finetune.training.reshard.resuming import here_of
from finetune.training.reshard.sharding import can_load_as_it_stands, sharding_of

RUNNING = "running_"  # prefix of batch norm statistics, which a forward pass changes


class TrainerSuspect(Suspect):
    """The Trainer also appends its losses to `losses`, and reports the gradient norm with `saw`."""

    @property
    def engine(self) -> Any:
        return self.trainer.deepspeed if self.trainer.is_deepspeed_enabled else None

    @property
    def sharing(self) -> int:
        return int(self.trainer.sequence.size)

    def prepare(self) -> None:
        # Collected once: walking over all modules before each step cost more than the rest of the guard.
        self.running = [
            (module, name)
            for module in self.trainer.model.modules()
            for name, _ in module.named_buffers(recurse=False)
            if name.startswith(RUNNING)
        ]
        if not self.trainer.clips_itself:  # otherwise the clipping code reports the norm
            super().prepare()

    def begin(self, window: list[dict[str, Any]], items: Any) -> None:
        """Take a step's micro-batches, and the number of items in them by which the loss is divided."""
        self.window, self.items, self.bad_norm = window, items, False
        self.losses: list[torch.Tensor] = []
        self.trainer.running_loss.begin_step()
        self.statistics = [(module, name, getattr(module, name).clone()) for module, name in self.running]

    def losses_are_finite(self) -> bool:
        return all(bool(torch.isfinite(loss)) for loss in self.losses)

    def is_scaled(self) -> bool:
        return super().is_scaled() if self.engine is not None else self.trainer.accelerator.scaler is not None

    def look(self, backward: bool) -> list[Finding]:
        trainer = self.trainer
        findings = []
        for number, batch in enumerate(self.window):
            inputs = trainer._prepare_inputs(dict(batch))
            found = odd_inputs(inputs)
            finder = Finder(trainer.model)
            with torch.set_grad_enabled(backward), finder.looking(), trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=self.items)
            found = found or finder.first
            if found is None and not bool(torch.isfinite(loss)):
                found = FoundLoss("", "the loss, although all outputs are finite: look at the labels")
            if backward and loss.requires_grad:
                found = found or finder.backward(loss, parameters=not trainer.needs_all_ranks)
            readers, reader = trainer.sequence.readers, trainer.sequence.reader
            findings.append(self.finding(trainer.sampler, number, found, readers, reader))
        self._restore_statistics()
        return findings

    def forget_loss(self) -> None:
        super().forget_loss()
        self._restore_statistics()

    def advance_schedule(self) -> None:
        trainer = self.trainer
        if self.engine is not None and self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step()  # a scheduler from the config; DeepSpeed skips it along with the step
        elif trainer.accelerator.optimizer_step_was_skipped:  # the Trainer has just made the same check
            trainer.lr_scheduler.step()

    def can_load(self, folder: Path) -> bool:
        return can_load_as_it_stands(sharding_of(folder), here_of(self.trainer))

    def roll_back(self, folder: Path) -> None:
        trainer, place = self.trainer, str(folder)
        schedule = trainer.lr_scheduler.state_dict()
        if self.engine is not None:
            deepspeed_load_checkpoint(trainer.model_wrapped, place)
        else:
            trainer._load_from_checkpoint(place, trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model)
        trainer._load_optimizer_and_scheduler(place)
        trainer._load_scaler(place)
        trainer.lr_scheduler.load_state_dict(schedule)
        for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _restore_statistics(self) -> None:
        for module, name, before in self.statistics:
            getattr(module, name).copy_(before)
