"""Learning rate schedules, for the Trainer and for a pipeline."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from finetune.run.schedules import Schedule, rule_of
from finetune.training.resuming import innermost

OURS = ("polynomial", *Schedule)  # schedules that the Trainer cannot build, or not for every optimizer


def make_schedule(args: Any, optimizer: Any, steps: int) -> Any:
    """The schedule of `TrainingArguments` over all `steps` of the run. It drives the optimizer that accelerate and ZeRO
    wrap: polynomial reads `optimizer.defaults` (transformers 5.23, optimization.py), which ZeRO's lacks."""
    inner = innermost(optimizer)
    own = rule_of(args.lr_scheduler_type, steps, args.lr_scheduler_kwargs)
    if own:
        return LambdaLR(inner, own)
    return get_scheduler(
        args.lr_scheduler_type,
        inner,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
