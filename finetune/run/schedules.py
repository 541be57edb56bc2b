"""Two of torch's schedules that transformers lacks, as a factor of --learning_rate for each step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container
from enum import Enum
from typing import Any

from finetune.run.snapshot import REQUIRED

Rule = Callable[[int], float]


class Schedule(str, Enum):
    """The values of --lr_scheduler_type that this toolkit adds."""

    STEP = "step"
    ONE_CYCLE = "one_cycle"


def step(total: int, step_size: int, gamma: float = 0.1) -> Rule:
    """torch.optim.lr_scheduler.StepLR."""
    if not isinstance(step_size, int) or step_size < 1:
        raise ValueError(f"step_size is {step_size!r}, but must be a whole number of steps, 1 or more")
    if gamma <= 0:
        raise ValueError(f"gamma is {gamma!r}, but must be more than 0")
    return lambda number: float(gamma ** (number // step_size))


def one_cycle(
    total: int,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Rule:
    """torch.optim.lr_scheduler.OneCycleLR of `total` steps, with the full rate as `max_lr`; momentum is not cycled."""
    if not 0 <= pct_start <= 1:
        raise ValueError(f"pct_start is {pct_start!r}, but must be from 0 to 1")
    if anneal_strategy not in ("cos", "linear"):
        raise ValueError(f"anneal_strategy is {anneal_strategy!r}, but must be 'cos' or 'linear'")
    if div_factor <= 0 or final_div_factor <= 0:
        raise ValueError("div_factor and final_div_factor must be more than 0")
    first = 1 / div_factor
    last, top = first / final_div_factor, pct_start * total - 1
    phases = [(top, first, 1.0), (2 * top, 1.0, first), (total - 1, first, last)]  # last step, first rate, last rate
    if not three_phase:
        phases = [phases[0], (total - 1, 1.0, last)]

    def factor(number: int) -> float:
        number = min(number, total - 1)  # it is called once more after the last step
        at = next((i for i, phase in enumerate(phases[:-1]) if number <= phase[0]), len(phases) - 1)
        begin, (end, low, high) = phases[at - 1][0] if at else 0.0, phases[at]
        share = (number - begin) / (end - begin) if end != begin else 1.0
        return high + (low - high) * (1 - share if anneal_strategy == "linear" else (1 + math.cos(math.pi * share)) / 2)

    return factor


RULES: dict[Schedule, Callable[..., Rule]] = {Schedule.STEP: step, Schedule.ONE_CYCLE: one_cycle}


def rule_of(kind: Any, total: int, given: dict[str, Any] | None) -> Rule | None:
    """The rule of one of our schedules for a run of `total` steps; None for one of transformers'."""
    return RULES[Schedule(kind)](total, **(given or {})) if kind in tuple(Schedule) else None


def parameters_of(maker: Callable[..., Any], left_out: Container[str]) -> dict[str, Any]:
    """The parameters of a schedule: name -> default, or REQUIRED."""
    every = inspect.signature(maker).parameters.values()
    empty = inspect.Parameter.empty
    return {one.name: REQUIRED if one.default is empty else one.default for one in every if one.name not in left_out}
