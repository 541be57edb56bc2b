"""What the NaN guard asks of a pipeline. Run again is the forward pass alone, for a pipeline's backward pass would take
the step; of a gradient it can say no more than the stage."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from finetune.training.guards.finder import Finder, Found, odd_inputs
from finetune.training.guards.nan_guard import Finding
from finetune.training.pipeline.evaluation import forward
from finetune.training.pipeline.resuming import roll_back
from finetune.training.reshard.sharding import Sharding, can_load_as_it_stands, sharding_of


class PipelineSuspect:
    """The trainer leaves its micro-batches in `window`; a stage between the first and the last reads none."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.window: list[dict[str, Any]] = []
        self.loss_before: Any = 0.0
        self.bad_norm = self.bad_stage = False

    def prepare(self) -> None:
        """As in finetune.training.guards.trainer_adapter."""
        optimizer = self.trainer.engine.optimizer
        if not hasattr(optimizer, "overflow"):
            optimizer.register_step_pre_hook(self._before_step)

    def begin(self, window: list[dict[str, Any]]) -> None:
        self.window, self.loss_before, self.bad_norm = window, self.trainer.running_loss.now, False

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A stage's gradients may be finite where another's are not."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.bad_stage = not bool(torch.isfinite(norm))
        bad = torch.tensor([float(self.bad_stage)], device=self.trainer.device)
        distributed.all_reduce(bad, distributed.ReduceOp.MAX)
        self.bad_norm = bool(bad.item())
        if self.bad_norm:
            optimizer.zero_grad(set_to_none=True)  # without gradients it changes nothing

    def hit(self) -> bool:
        return bool(getattr(self.trainer.engine.optimizer, "overflow", self.bad_norm))

    def losses_are_finite(self) -> bool:
        return bool(torch.isfinite(torch.as_tensor(self.trainer.engine.agg_train_loss)).all())

    def is_scaled(self) -> bool:
        return bool(self.trainer.engine.fp16_enabled())

    def look(self, backward: bool) -> list[Finding]:
        trainer = self.trainer
        findings = [
            Finding(trainer.launch.rank, number, odd, self._samples(number))
            for number, batch in enumerate(self.window)
            if (odd := odd_inputs(batch))
        ]
        if backward:
            stage = f"stage {trainer.stage}" if self.bad_norm else "some stage"  # DeepSpeed tells no more
            if self.bad_stage or (trainer.launch.speaks and not self.bad_norm):
                what = f"a gradient of {stage}, of outputs that are finite (which module's, a pipeline does not tell)"
                findings.append(Finding(trainer.launch.rank, 0, Found("", what), self._samples(0)))
            return findings
        firsts: list[Found | None] = []
        finder = Finder(trainer.engine.module)

        def done(module: Any, inputs: Any, output: Any) -> None:
            firsts.append(finder.first)
            finder.first = None

        with finder.looking():
            handle = trainer.engine.module.register_forward_hook(done)
            try:
                forward(trainer, self.window)
            finally:
                handle.remove()
        found = [(number, first) for number, first in enumerate(firsts) if first]
        return findings + [
            Finding(trainer.launch.rank, number, first, self._samples(number)) for number, first in found
        ]

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return [{k: v for k, v in batch.items() if isinstance(v, torch.Tensor)} for batch in self.window]

    def forget_loss(self) -> None:
        self.trainer.running_loss.now = self.loss_before

    def advance_schedule(self) -> None:
        if hasattr(self.trainer.engine.optimizer, "overflow"):  # else DeepSpeed has done it
            self.trainer.scheduler.step()

    def can_load(self, folder: Path) -> bool:
        return can_load_as_it_stands(sharding_of(folder), Sharding("pipeline", self.trainer.launch.world_size))

    def roll_back(self, folder: Path) -> None:
        roll_back(self.trainer, folder)

    def _samples(self, number: int) -> list[int]:
        """Of this pipeline's micro-batch `number` of the step (see finetune.training.pipeline.batches)."""
        trainer = self.trainer
        size, batch = trainer.args.train_batch_size, trainer.global_batch_size
        step = trainer.state.global_step % trainer.steps_per_epoch
        first = step * batch + (number * trainer.pipelines + trainer.pipeline) * size
        return list(islice(iter(trainer.sampler), first, first + size))
