"""The losses of a run since its last log, and of all its steps. Checkpoints keep both."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from finetune.training.source_losses import SourceLosses


class RunningLoss(TrainerCallback, ExportableState):
    """Keeps the losses since the last log, and those logged before, in each checkpoint's trainer_state.json.

    The Trainer loses both (transformers 5.23, Trainer._inner_training_loop sets them to 0): the first loss that a
    resumed run logs would omit the steps before the interruption, and `train_loss` would omit all earlier steps. The
    Trainer's sums are private, so they are repeated here, bit for bit as it adds them (Trainer._run_epoch).
    """

    def __init__(self) -> None:
        self.sums: list[float] = []  # each rank's sum since the last log, as of the last checkpoint
        self.logged_step = -1  # the step of the last log; -1 if nothing was restored
        self.total = 0.0  # the sum up to that step
        self.first_step = 0  # the step after which counting began
        self.now = self.before = torch.zeros(())  # this rank's sum since the last log; and at the start of the step
        self.sources: SourceLosses | None = None  # of a mixture
        self.kept_of_sources: dict[str, list[float]] = {}  # what `sources` noted for the last checkpoint
        self.of_sources: dict[str, dict[str, float]] = {}  # of the whole run, once it has ended

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """By now the Trainer knows its first step, and a checkpoint's values have been restored."""
        step, kept = state.global_step, 0.0
        goes_on = bool(step) and 0 <= self.logged_step <= step
        if goes_on:
            kept, self.first_step = self.of_rank(args.process_index, args.world_size), 0
        else:
            self.total, self.first_step, self.logged_step = 0.0, step, step
        self.now = self.before = torch.tensor(kept, dtype=torch.float32, device=args.device)
        if self.sources:
            self.sources.begin(args.device, self.kept_of_sources if goes_on else {}, not args.process_index)

    def begin_step(self) -> None:
        self.before = self.now
        if self.sources:
            self.sources.before = self.sources.now

    def forget_step(self) -> None:
        """Drop what was added since `begin_step`."""
        self.now = self.before
        if self.sources:
            self.sources.now = self.sources.before

    def add(self, loss: torch.Tensor, step: int, filters: bool) -> None:
        """Add a micro-batch's loss; with `filters`, one that is not finite is replaced by the mean of those before."""
        if filters:
            loss = torch.where(torch.isfinite(loss), loss, self.now / (1 + step - self.logged_step))
        self.now = self.now + loss
        if self.sources:
            self.sources.add(filters)

    def window(self, step: int, gather: Any) -> float:
        """The mean loss of the steps since the last log, over all ranks. All ranks must call it."""
        losses = float(self._of_ranks(gather).mean())
        mean = losses / max(step - self.logged_step, 1)
        self.total, self.now, self.logged_step = self.total + losses, torch.zeros_like(self.now), step
        return mean

    def window_of_sources(self, gather: Any) -> dict[str, float]:
        """The same for each source of a mixture. All ranks must call it."""
        return self.sources.window(gather) if self.sources else {}

    def mean(self, step: int, gather: Any) -> float:
        """The mean loss of all steps, including those of earlier launches; also sets `of_sources`. All ranks must call
        it."""
        self.of_sources = self.sources.means(gather) if self.sources else {}
        return (self.total + float(self._of_ranks(gather).mean())) / max(step - self.first_step, 1)

    def note(self, gather: Any) -> None:
        """Record the sums for a checkpoint. All ranks must call it."""
        self.sums = self._of_ranks(gather).tolist()
        self.kept_of_sources = self.sources.noted(gather) if self.sources else {}

    def _of_ranks(self, gather: Any) -> torch.Tensor:
        found: torch.Tensor = gather(self.now.reshape(1))
        return found

    def state(self) -> dict[str, Any]:
        kept = {"sums": self.sums, "logged_step": self.logged_step, "total": self.total}
        return {"args": {}, "attributes": {**kept, "kept_of_sources": self.kept_of_sources}}

    def of_rank(self, rank: int, world_size: int) -> float:
        """This rank's sum; if the world size has changed, the mean over ranks, which gives the same logged loss."""
        if len(self.sums) == world_size:
            return self.sums[rank]
        return sum(self.sums) / max(len(self.sums), 1)
