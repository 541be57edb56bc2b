"""What a resumed run needs beyond weights, optimizer and schedule to be bit-equal to one that was never cut: the losses
not yet logged, what callbacks remember, saves that come after all else of their step, and evaluations that draw
nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy


class RunningLoss(TrainerCallback, ExportableState):
    """The losses since the last log, and those logged before, in each checkpoint's trainer_state.json.

    The Trainer forgets both (transformers 5.23, Trainer._inner_training_loop sets them to 0): the first loss that a
    resumed run logs would leave out the steps before the cut, and `train_loss` all of them.
    """

    def __init__(self) -> None:
        self.sums: list[float] = []  # since the last log, of each rank
        self.logged_step = -1  # that of the last log; -1 where nothing was kept
        self.total = 0.0  # of the steps until then

    def note(self, trainer: Any) -> None:
        """What the Trainer has now. Every rank must call it, before a checkpoint."""
        self.sums = trainer.accelerator.gather(trainer._tr_loss.detach().reshape(1)).tolist()
        self.logged_step, self.total = trainer._globalstep_last_logged, trainer._total_loss_scalar

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": dict(vars(self))}

    def of_rank(self, rank: int, world_size: int) -> float:
        """What this rank had; of a run of another world size each has the mean, which is what is logged."""
        if len(self.sums) == world_size:
            return self.sums[rank]
        return sum(self.sums) / max(len(self.sums), 1)


class GoOn(TrainerCallback):
    """Once the Trainer has loaded a checkpoint, and set its sums of losses to 0, a resumed run gets what is missing."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, kept = self.trainer, self.trainer.running_loss
        if not state.global_step:
            return
        replay_cpu_adam(trainer.optimizer)
        if 0 <= kept.logged_step <= state.global_step:
            trainer._tr_loss += kept.of_rank(args.process_index, args.world_size)
            trainer._globalstep_last_logged, trainer._total_loss_scalar = kept.logged_step, kept.total


class SavesLast(TrainerCallback):
    """A save at the last step of an epoch waits for what is due at the epoch's end. The Trainer would save first, and a
    run that is cut right then would go on without that evaluation: without its row, its best metric, and its say in
    early stopping. Add it before StopOnSignal, whose saves do not wait."""

    def __init__(self) -> None:
        self.waits = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        ends = control.should_training_stop or float(state.epoch).is_integer()
        self.waits = bool(due and ends and control.should_save)
        if self.waits:
            control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or self.waits
        self.waits = False


def restore_callbacks(callbacks: Sequence[TrainerCallback], state: Any, all_of_them: bool) -> None:
    """Give callbacks what they remembered when `state` was saved; without `all_of_them` the losses alone.

    In place, and without their arguments, which are those of this run: the Trainer builds them anew with those of the
    old one, so that a new --early_stopping_patience would be passed over without a word (transformers 5.23,
    Trainer._load_callback_state). It also fails to save where a callback is new: it looks for its old state.
    """
    for callback in callbacks:
        if not isinstance(callback, ExportableState):
            continue
        kept = state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
        if isinstance(kept, dict) and (all_of_them or isinstance(callback, RunningLoss)):
            known = vars(callback)
            known.update({name: value for name, value in kept.get("attributes", {}).items() if name in known})


def ended_early(callbacks: Sequence[TrainerCallback]) -> bool:
    """Whether the run was stopped for want of progress when its last checkpoint was saved."""
    return any(
        isinstance(callback, EarlyStoppingCallback)
        and callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in callbacks
    )


def replay_cpu_adam(optimizer: Any) -> None:
    """Bring DeepSpeed's CPU Adam, which a checkpoint has been loaded into, to the digits of one that took all steps.

    It multiplies the powers of its betas up from step to step, in fp32, and keeps them in C++ where no checkpoint has
    them: after a resumption it takes `pow` instead, whose last digits are others, and so is every weight from then on
    (deepspeed 0.19.8, ops/csrc/includes/cpu_adam.h, IncrementStep). Here it takes the steps once more, on one number.
    Some microseconds a step. Let this go once DeepSpeed derives the powers from the step alone.
    """
    while optimizer is not None and not hasattr(optimizer, "ds_opt_adam"):
        optimizer = getattr(optimizer, "optimizer", None)  # accelerate's and ZeRO's stand around it
    if optimizer is None:
        return
    done = max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    group = optimizer.param_groups[0]
    numbers = [torch.zeros(1) for _ in range(4)]  # weight, gradient and both averages
    for step in range(1, done + 1):
        optimizer.ds_opt_adam.adam_update(
            *(optimizer.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"]), *numbers
        )


@contextmanager
def kept_random_states() -> Iterator[None]:
    """What runs inside draws nothing from what comes after it: a data loader draws a seed even where it shuffles
    nothing, and training would depend on how often it is evaluated."""
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
