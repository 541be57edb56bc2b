"""What a resumed run needs beyond weights, optimizer and schedule to be bit-equal to one that was never cut: the losses
not yet logged, what callbacks remember, saves that come after all else of their step, and evaluations that draw
nothing. And the settings of its own flags, at the checkpoint's step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from finetune.data.image_samples import Pictures
from finetune.data.sampling import GlobalBatchSampler
from finetune.training.reshard.portable import settings_of

# Of an optimizer's groups what flags say that may change; rates follow from the schedule. The rest is the optimizer's
# own, and may be of its state, such as `setup` in torch-optimi's (optimi/stableadamw.py), which counts steps anew where
# it is False.
FROM_FLAGS = ("betas", "beta1", "beta2", "eps", "weight_decay")


class RunningLoss(TrainerCallback, ExportableState):
    """The losses since the last log, and those logged before, in each checkpoint's trainer_state.json.

    The Trainer forgets both (transformers 5.23, Trainer._inner_training_loop sets them to 0): the first loss that a
    resumed run logs would leave out the steps before the cut, and `train_loss` all of them. Its own are private, so
    they are added up here once more, as it adds them (Trainer._run_epoch), to the bit.
    """

    def __init__(self) -> None:
        self.sums: list[float] = []  # since the last log, of each rank, as of the last checkpoint
        self.logged_step = -1  # that of the last log; -1 where nothing was kept
        self.total = 0.0  # of the steps until then
        self.first_step = 0  # after which they were counted
        self.now = torch.zeros(())  # since the last log, of this rank, on its device

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer knows after which step it begins, and what was kept is here again."""
        step, kept = state.global_step, 0.0
        if step and 0 <= self.logged_step <= step:
            kept, self.first_step = self.of_rank(args.process_index, args.world_size), 0
        else:
            self.total, self.first_step, self.logged_step = 0.0, step, step
        self.now = torch.tensor(kept, dtype=torch.float32, device=args.device)

    def add(self, loss: torch.Tensor, step: int, filters: bool) -> None:
        """That of a micro-batch; with `filters` the mean of those before in place of one that is no number."""
        if filters:
            loss = torch.where(torch.isfinite(loss), loss, self.now / (1 + step - self.logged_step))
        self.now = self.now + loss

    def window(self, step: int, gather: Any) -> float:
        """The mean of the steps since the last log, over all ranks, each of which must call it."""
        losses = float(self._of_ranks(gather).mean())
        mean = losses / max(step - self.logged_step, 1)
        self.total, self.now, self.logged_step = self.total + losses, torch.zeros_like(self.now), step
        return mean

    def mean(self, step: int, gather: Any) -> float:
        """Of all steps, whichever launch took them."""
        return (self.total + float(self._of_ranks(gather).mean())) / max(step - self.first_step, 1)

    def note(self, gather: Any) -> None:
        """For a checkpoint. Every rank must call it."""
        self.sums = self._of_ranks(gather).tolist()

    def _of_ranks(self, gather: Any) -> torch.Tensor:
        found: torch.Tensor = gather(self.now.reshape(1))
        return found

    def state(self) -> dict[str, Any]:
        kept = {"sums": self.sums, "logged_step": self.logged_step, "total": self.total}
        return {"args": {}, "attributes": kept}

    def of_rank(self, rank: int, world_size: int) -> float:
        """What this rank had; of a run of another world size each has the mean, which is what is logged."""
        if len(self.sums) == world_size:
            return self.sums[rank]
        return sum(self.sums) / max(len(self.sums), 1)


class GoOn(TrainerCallback):
    """Once the Trainer has loaded a checkpoint, and before its first step, a resumed run gets what is missing."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        state.num_train_epochs = trainer.epochs
        state.compute_steps(args, trainer.max_steps)  # which the checkpoint's have overruled
        if trainer.reshard:
            trainer.reshard.mend()
            trainer.own_settings.put_back(trainer.optimizer, trainer.lr_scheduler)
            if state.is_world_process_zero:
                trainer.saves.go_on()
                print(f"going on from {trainer.saves.chosen}, after step {state.global_step}", flush=True)
        replay_cpu_adam(trainer.optimizer)


class Epochs(TrainerCallback):
    """Tells the sampler which epoch it is, and pictures that change with it. accelerate 1.15 does not reach the sampler
    in a run of several ranks that is resumed inside an epoch: SkipBatchSampler and BatchSamplerShard both stand between
    (data_loader.py, DataLoaderShard)."""

    def __init__(self, sampler: GlobalBatchSampler, dataset: Any) -> None:
        self.sampler, self.dataset = sampler, dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int(state.epoch or 0)
        self.sampler.set_epoch(epoch)
        if isinstance(self.dataset, Pictures):
            self.dataset.begin_epoch(epoch)


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


@dataclass(frozen=True)
class OwnSettings:
    """Of each group of an optimizer, as the flags made it; take them once it is built, and before a checkpoint is
    loaded: that brings back the groups' settings and the schedule's rates of before, whatever the flags say."""

    groups: tuple[Mapping[str, Any], ...]
    clip: float | None  # of an optimizer of DeepSpeed's that clips by itself

    @classmethod
    def of(cls, optimizer: Any) -> OwnSettings:
        found = [settings_of(group) for group in innermost(optimizer).param_groups]
        rates = [{**settings, "lr": settings.get("initial_lr", settings["lr"])} for settings in found]
        clips = [one.clip_grad for one in around(optimizer) if hasattr(one, "clip_grad")]
        return cls(tuple(rates), clips[0] if clips else None)

    def put_back(self, optimizer: Any, scheduler: Any) -> None:
        """After a checkpoint has been loaded. Where the flags are those of before, no bit changes."""
        inner, schedule = innermost(optimizer), _schedule(scheduler)
        for group, own in zip(inner.param_groups, self.groups, strict=True):
            group.update({name: value for name, value in own.items() if name in FROM_FLAGS and name in group})
        for one in around(optimizer):
            if self.clip is not None and hasattr(one, "clip_grad"):  # ZeRO-1, 2 and BF16_Optimizer keep the old one
                one.clip_grad = self.clip
        if isinstance(schedule, LambdaLR):
            schedule.base_lrs = [own["lr"] for own in self.groups]
            pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            rates = [base * rule(schedule.last_epoch) for base, rule in pairs]
            for group, base, rate in zip(inner.param_groups, schedule.base_lrs, rates, strict=True):
                group.update(initial_lr=base, lr=rate)
            schedule.load_state_dict({**schedule.state_dict(), "_last_lr": rates})  # what is logged
        elif type(schedule).__module__.startswith("deepspeed."):
            schedule.step(schedule.last_batch_iteration)  # the rates of a schedule in the config, at this step


def innermost(optimizer: Any) -> Any:
    """The optimizer that takes the steps, without what accelerate and ZeRO put around it."""
    return list(around(optimizer))[-1]


def around(optimizer: Any) -> Iterable[Any]:
    """From the outermost to the innermost."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _schedule(scheduler: Any) -> Any:
    while hasattr(scheduler, "scheduler"):  # accelerate's
        scheduler = scheduler.scheduler
    return scheduler


def replay_cpu_adam(optimizer: Any) -> None:
    """Bring DeepSpeed's CPU Adam, which a checkpoint has been loaded into, to the digits of one that took all steps.

    It multiplies the powers of its betas up from step to step, in fp32, and keeps them in C++ where no checkpoint has
    them: after a resumption it takes `pow` instead, whose last digits are others, and so is every weight from then on
    (deepspeed 0.19.8, ops/csrc/includes/cpu_adam.h, IncrementStep). Here it takes the steps once more, on one number.
    Some microseconds a step. Let this go once DeepSpeed derives the powers from the step alone.
    """
    optimizer = innermost(optimizer)
    if not hasattr(optimizer, "ds_opt_adam"):
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
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)


def random_states() -> dict[str, Any]:
    """Python's, numpy's, and torch's on the CPU and on this rank's GPU, as a file of plain tensors and numbers takes
    them."""
    drawn: Any = np.random.get_state()
    kind, keys, *rest = drawn
    numpy = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
    return {**rng_state(), "python": random.getstate(), "numpy": numpy}


def set_random_states(states: Mapping[str, Any]) -> None:
    set_rng_state(states)
    if "python" in states:  # not in checkpoints of older versions
        random.setstate(states["python"])
        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def rng_state() -> dict[str, Any]:
    """Torch's alone."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_rng_state(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and states.get("cuda") is not None:
        torch.cuda.set_rng_state(states["cuda"])
