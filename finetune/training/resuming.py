"""What a resumed run needs, besides weights, optimizer and schedule, to be bit-identical to an uninterrupted one: the
losses not yet logged, the state of callbacks, saves that come last in their step, and evaluations that leave random
states unchanged. Also its own flags' settings, applied at the checkpoint's step."""

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
from finetune.training.running_loss import RunningLoss

# Settings of an optimizer's groups that come from flags that may change; learning rates follow from the schedule. The
# others belong to the optimizer and may be state, such as `setup` in torch-optimi (optimi/stableadamw.py), which
# restarts its step count if it is False.
FROM_FLAGS = ("betas", "beta1", "beta2", "eps", "weight_decay")


class GoOn(TrainerCallback):
    """Completes a resumed run after the Trainer has loaded a checkpoint, before the first step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        state.num_train_epochs = trainer.epochs
        state.compute_steps(args, trainer.max_steps)  # the checkpoint's values have overwritten these
        if trainer.reshard:
            trainer.own_settings.put_back(trainer.optimizer, trainer.lr_scheduler)
            if state.is_world_process_zero:
                trainer.saves.go_on()
                print(f"going on from {trainer.saves.chosen}, after step {state.global_step}", flush=True)
        replay_cpu_adam(trainer.optimizer)
        keep_off_triton(trainer.optimizer)


class Epochs(TrainerCallback):
    """Sets the epoch of the sampler, and of images that change with it. accelerate 1.15 does not reach the sampler when
    a run of several ranks is resumed inside an epoch: SkipBatchSampler and BatchSamplerShard both wrap it
    (data_loader.py, DataLoaderShard)."""

    def __init__(self, sampler: GlobalBatchSampler, dataset: Any) -> None:
        self.sampler, self.dataset = sampler, dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int(state.epoch or 0)
        self.sampler.set_epoch(epoch)
        if isinstance(self.dataset, Pictures):
            self.dataset.begin_epoch(epoch)


class SavesLast(TrainerCallback):
    """Delays a save at the last step of an epoch until the evaluation and logging due at its end are done. The Trainer
    would save first, and a run interrupted right then would resume without that evaluation: without its row, its best
    metric, and its effect on early stopping. Add it before StopOnSignal, whose saves do not wait."""

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
    """Restore the callbacks' attributes from a saved `state`; without `all_of_them`, only those of RunningLoss.

    Callbacks keep this run's arguments. The Trainer would rebuild them with the old run's, and so silently ignore a new
    --early_stopping_patience (transformers 5.23, Trainer._load_callback_state). It also fails to save if a callback is
    new, because it looks for its old state.
    """
    for callback in callbacks:
        if not isinstance(callback, ExportableState):
            continue
        kept = state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
        if isinstance(kept, dict) and (all_of_them or isinstance(callback, RunningLoss)):
            known = vars(callback)
            known.update({name: value for name, value in kept.get("attributes", {}).items() if name in known})


def ended_early(callbacks: Sequence[TrainerCallback]) -> bool:
    """Whether early stopping had ended the run when its last checkpoint was saved."""
    return any(
        isinstance(callback, EarlyStoppingCallback)
        and callback.early_stopping_patience_counter >= callback.early_stopping_patience
        for callback in callbacks
    )


@dataclass(frozen=True)
class OwnSettings:
    """The settings of each optimizer group as the flags made them. Take them after building the optimizer and before
    loading a checkpoint, which overwrites the groups' settings and the schedule's rates with the old ones."""

    groups: tuple[Mapping[str, Any], ...]
    clip: float | None  # of a DeepSpeed optimizer that clips by itself

    @classmethod
    def of(cls, optimizer: Any) -> OwnSettings:
        found = [settings_of(group) for group in innermost(optimizer).param_groups]
        rates = [{**settings, "lr": settings.get("initial_lr", settings["lr"])} for settings in found]
        clips = [one.clip_grad for one in around(optimizer) if hasattr(one, "clip_grad")]
        return cls(tuple(rates), clips[0] if clips else None)

    def put_back(self, optimizer: Any, scheduler: Any) -> None:
        """Call it after a checkpoint has been loaded. If the flags have not changed, no bit changes."""
        inner, schedule = innermost(optimizer), _schedule(scheduler)
        for group, own in zip(inner.param_groups, self.groups, strict=True):
            group.update({name: value for name, value in own.items() if name in FROM_FLAGS and name in group})
        for one in around(optimizer):
            if self.clip is not None and hasattr(one, "clip_grad"):  # ZeRO-1, 2 and BF16_Optimizer restore the old one
                one.clip_grad = self.clip
        if isinstance(schedule, LambdaLR):
            schedule.base_lrs = [own["lr"] for own in self.groups]
            pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            rates = [base * rule(schedule.last_epoch) for base, rule in pairs]
            for group, base, rate in zip(inner.param_groups, schedule.base_lrs, rates, strict=True):
                group.update(initial_lr=base, lr=rate)
            schedule.load_state_dict({**schedule.state_dict(), "_last_lr": rates})  # the logged rates
        elif type(schedule).__module__.startswith("deepspeed."):
            schedule.step(schedule.last_batch_iteration)  # the rates of a schedule in the config, at this step


def innermost(optimizer: Any) -> Any:
    """The optimizer that takes the steps, without the wrappers of accelerate and ZeRO."""
    return list(around(optimizer))[-1]


def around(optimizer: Any) -> Iterable[Any]:
    """An optimizer and those that it wraps, from the outermost to the innermost."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _schedule(scheduler: Any) -> Any:
    while hasattr(scheduler, "scheduler"):  # accelerate's wrapper
        scheduler = scheduler.scheduler
    return scheduler


def replay_cpu_adam(optimizer: Any) -> None:
    """After loading a checkpoint, make DeepSpeed's CPU Adam bit-identical to one that took all steps.

    It accumulates the powers of its betas step by step, in fp32, in C++ state that no checkpoint holds. After resuming
    it uses `pow` instead, which differs in the last digits, and so does every weight from then on (deepspeed 0.19.8,
    ops/csrc/includes/cpu_adam.h, IncrementStep). Here it repeats the steps on a single number, which takes microseconds
    per step. Remove this once DeepSpeed derives the powers from the step alone.
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


def keep_off_triton(optimizer: Any) -> None:
    """Make an optimizer of torch-optimi that steps weights on a CPU use torch's own operators.

    If Triton is installed, as it is beside torch's CUDA build, torch-optimi chooses it before it looks at the first
    weight, and a step on a CPU fails (torch-optimi 0.3.3, optimi/stableadamw.py, _init_group)."""
    for group in innermost(optimizer).param_groups:
        if "triton" in group and all(p.device.type == "cpu" for p in group["params"]):
            group["triton"] = False


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the random states after this block: a data loader draws a seed even if it does not shuffle, so training
    would depend on how often it is evaluated."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)


def random_states() -> dict[str, Any]:
    """The random states of Python, numpy, and torch on the CPU and on this rank's GPU, as plain tensors and numbers."""
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
    """Only torch's random states."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_rng_state(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and states.get("cuda") is not None:
        torch.cuda.set_rng_state(states["cuda"])
