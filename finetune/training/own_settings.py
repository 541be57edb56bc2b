"""Optimizer and schedule of a resumed run are those that its flags make, at the checkpoint's step. What loads a
checkpoint brings back the groups' settings and the schedule's rates of before, whatever the flags say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from finetune.training.reshard.portable import settings_of

RATES = ("lr", "initial_lr")  # which follow from the schedule


@dataclass(frozen=True)
class OwnSettings:
    """Of each group, as the flags made it; take them once the optimizer is built, and before a checkpoint is loaded."""

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
            group.update({name: value for name, value in own.items() if name in group and name not in RATES})
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
