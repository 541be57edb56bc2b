"""What the NaN guard asks of the Hugging Face Trainer, with and without DeepSpeed and FSDP."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from finetune.data.packing import REAL_TOKENS
from finetune.data.sampling import GlobalBatchSampler
from finetune.training.guards.finder import Finder, Found, odd_inputs
from finetune.training.guards.nan_guard import Finding
from finetune.training.reshard.resuming import here_of
from finetune.training.reshard.sharding import can_load_as_it_stands, sharding_of

RUNNING = "running_"  # the statistics of batch norms, which a forward pass changes


class TrainerSuspect:
    """The Trainer leaves its micro-batches in `window`, the losses in `losses` and the norm of the gradients with
    `saw`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.window: list[dict[str, Any]] = []
        self.items: Any = None
        self.losses: list[torch.Tensor] = []
        self.bad_norm = False
        self.loss_before = torch.zeros(())  # of the steps since the last log
        self.statistics: dict[str, torch.Tensor] = {}

    def prepare(self) -> None:
        """DeepSpeed's own optimizers leave out what is not finite (ZeRO, bf16, fp16: 0.19.8, `overflow`). One of torch,
        at stage 0 in fp32, does not; where the Trainer clips for it, the norm is seen there."""
        trainer = self.trainer
        if not trainer.is_deepspeed_enabled or trainer.clips_itself:
            return
        optimizer = trainer.deepspeed.optimizer
        if not hasattr(optimizer, "overflow"):
            optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.saw(torch.nn.utils.get_total_norm(gradients)):
            optimizer.zero_grad(set_to_none=True)

    def begin(self, window: list[dict[str, Any]], items: Any) -> None:
        """A step's micro-batches, and the number of items in them by which the loss is divided."""
        self.window, self.items, self.losses, self.bad_norm = window, items, [], False
        self.loss_before = self.trainer.running_loss.now
        buffers = self.trainer.model.named_buffers()
        self.statistics = {name: b.clone() for name, b in buffers if name.rpartition(".")[2].startswith(RUNNING)}

    def saw(self, norm: Any) -> bool:
        """Tell the gradients' norm, the same on all ranks. True where no step may be taken."""
        self.bad_norm = norm is not None and not bool(torch.isfinite(torch.as_tensor(norm)))
        return self.bad_norm

    def hit(self) -> bool:
        if not self.trainer.is_deepspeed_enabled:
            return self.bad_norm
        return bool(getattr(self.trainer.deepspeed.optimizer, "overflow", self.bad_norm))

    def losses_are_finite(self) -> bool:
        return all(bool(torch.isfinite(loss)) for loss in self.losses)

    def is_scaled(self) -> bool:
        trainer = self.trainer
        if trainer.is_deepspeed_enabled:
            return bool(trainer.deepspeed.fp16_enabled())
        return trainer.accelerator.scaler is not None

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
                found = Found("", "the loss, of outputs that are finite: look at the labels")
            if backward and loss.requires_grad:
                found = found or finder.backward(loss, parameters=not trainer.shards_weights)
            findings.append(Finding(trainer.args.process_index, number, found, self._samples(number)))
        self._restore_statistics()
        return findings

    def batches(self) -> list[dict[str, torch.Tensor]]:
        kept = [{k: v for k, v in batch.items() if isinstance(v, torch.Tensor)} for batch in self.window]
        return [{name: value for name, value in batch.items() if name != REAL_TOKENS} for batch in kept]

    def forget_loss(self) -> None:
        self.trainer.running_loss.now = self.loss_before
        self._restore_statistics()

    def advance_schedule(self) -> None:
        trainer = self.trainer
        of_engine = trainer.deepspeed.lr_scheduler if trainer.is_deepspeed_enabled else None
        if of_engine is not None:  # by a section of the config; DeepSpeed leaves it out with the step
            of_engine.step()
        elif trainer.accelerator.optimizer_step_was_skipped:  # as the Trainer asked just now
            trainer.lr_scheduler.step()

    def can_load(self, folder: Path) -> bool:
        return can_load_as_it_stands(sharding_of(folder), here_of(self.trainer))

    def roll_back(self, folder: Path) -> None:
        trainer, place = self.trainer, str(folder)
        schedule = trainer.lr_scheduler.state_dict()
        if trainer.is_deepspeed_enabled:
            deepspeed_load_checkpoint(trainer.model_wrapped, place)
        else:
            trainer._load_from_checkpoint(place, trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model)
        trainer._load_optimizer_and_scheduler(place)
        trainer._load_scaler(place)
        trainer.lr_scheduler.load_state_dict(schedule)
        for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _restore_statistics(self) -> None:
        buffers = dict(self.trainer.model.named_buffers())
        for name, before in self.statistics.items():
            buffers[name].copy_(before)

    def _samples(self, number: int) -> list[int] | None:
        """The rows of the prepared training set in this rank's micro-batch `number` of the step: accelerate deals
        micro-batches to the ranks in turn (data_loader.py, BatchSamplerShard)."""
        trainer = self.trainer
        sampler = trainer.global_batches
        if not isinstance(sampler, GlobalBatchSampler):
            return None
        step = trainer.state.global_step % (len(sampler) // sampler.global_batch_size)
        size, world = trainer.args.train_batch_size, trainer.args.world_size
        first = step * sampler.global_batch_size + (number * world + trainer.args.process_index) * size
        return list(islice(iter(sampler), first, first + size))
