"""The NaN guard's interface to a pipeline. Only the forward pass is run again, because a pipeline's backward pass would
take the step; for a bad gradient it can only name the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed

from finetune.training.checkpoints.writing import read_together
from finetune.training.guards.finder import Finder, Found, odd_inputs
from finetune.training.guards.nan_guard import Finding, Suspect
from finetune.training.pipeline.checkpoint import read_record
from finetune.training.pipeline.evaluation import forward
from finetune.training.reshard.sharding import Sharding, can_load_as_it_stands, sharding_of
from finetune.training.resuming import rng_state, set_rng_state


class PipelineSuspect(Suspect):
    """Stages between the first and the last read no micro-batches."""

    bad_stage = False

    @property
    def engine(self) -> Any:
        return self.trainer.engine

    def begin(self, window: list[dict[str, Any]]) -> None:
        self.window, self.bad_norm = window, False
        self.trainer.running_loss.begin_step()

    def saw(self, norm: Any) -> bool:
        """One stage's gradients may be finite when another's are not."""
        self.bad_stage = super().saw(norm)
        bad = torch.tensor([float(self.bad_stage)], device=self.trainer.device)
        distributed.all_reduce(bad, distributed.ReduceOp.MAX)
        self.bad_norm = bool(bad.item())
        return self.bad_norm

    def losses_are_finite(self) -> bool:
        return bool(torch.isfinite(torch.as_tensor(self.engine.agg_train_loss)).all())

    def look(self, backward: bool) -> list[Finding]:
        trainer = self.trainer
        found = [(number, odd) for number, batch in enumerate(self.window) if (odd := odd_inputs(batch))]
        if not backward:
            found += [(number, first) for number, first in enumerate(self._firsts()) if first]
        elif self.bad_stage or (trainer.launch.speaks and not self.bad_norm):
            stage = f"stage {trainer.stage}" if self.bad_norm else "some stage"  # all that DeepSpeed reports
            what = f"a gradient of {stage}, although all outputs are finite (a pipeline does not tell which module's)"
            found.append((0, Found("", what)))
        return [
            self.finding(trainer.sampler, number, odd, trainer.pipelines, trainer.pipeline) for number, odd in found
        ]

    def _firsts(self) -> list[Found | None]:
        """The first finding in this stage's forward pass of each micro-batch."""
        firsts: list[Found | None] = []
        finder = Finder(self.engine.module)

        def done(module: Any, inputs: Any, output: Any) -> None:
            firsts.append(finder.first)
            finder.first = None

        with finder.looking():
            handle = self.engine.module.register_forward_hook(done)
            try:
                forward(self.trainer, self.window)
            finally:
                handle.remove()
        return firsts

    def advance_schedule(self) -> None:
        if self.engine_leaves_out:  # otherwise DeepSpeed has done it
            self.trainer.scheduler.step()

    def can_load(self, folder: Path) -> bool:
        return can_load_as_it_stands(sharding_of(folder), Sharding("pipeline", self.trainer.launch.world_size))

    def roll_back(self, folder: Path) -> None:
        schedule, states = self.trainer.scheduler.state_dict(), rng_state()
        checkpoints = self.trainer.checkpoints
        read_together(folder, lambda: checkpoints.load(folder, read_record(folder)))
        self.trainer.checkpoints.load_schedule(schedule)
        set_rng_state(states)
