"""Two schedules of torch's that transformers lacks, as a factor of --learning_rate by the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from finetune.run.snapshot import REQUIRED, snapshot

if TYPE_CHECKING:
    from finetune.run.run import Run

Rule = Callable[[int], float]


class Schedule(str, Enum):
    """The values of --lr_scheduler_type that are ours."""

    STEP = "step"
    ONE_CYCLE = "one_cycle"


def step(total: int, step_size: int, gamma: float = 0.1) -> Rule:
    """torch.optim.lr_scheduler.StepLR."""
    if not isinstance(step_size, int) or step_size < 1:
        raise ValueError(f"step_size is {step_size!r}, and must be a whole number of steps, 1 or more")
    if gamma <= 0:
        raise ValueError(f"gamma is {gamma!r}, and must be more than 0")
    return lambda number: float(gamma ** (number // step_size))


def one_cycle(
    total: int,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Rule:
    """torch.optim.lr_scheduler.OneCycleLR of `total` steps, whose `max_lr` is the full rate; but momentum stays."""
    if not 0 <= pct_start <= 1:
        raise ValueError(f"pct_start is {pct_start!r}, and must be from 0 to 1")
    if anneal_strategy not in ("cos", "linear"):
        raise ValueError(f"anneal_strategy is {anneal_strategy!r}, and must be 'cos' or 'linear'")
    if div_factor <= 0 or final_div_factor <= 0:
        raise ValueError("div_factor and final_div_factor must be more than 0")
    first = 1 / div_factor
    last, top = first / final_div_factor, pct_start * total - 1
    phases = [(top, first, 1.0), (2 * top, 1.0, first), (total - 1, first, last)]  # the last step, and rates there
    if not three_phase:
        phases = [phases[0], (total - 1, 1.0, last)]

    def factor(number: int) -> float:
        number = min(number, total - 1)  # it is asked once more behind the last step
        at = next((i for i, phase in enumerate(phases[:-1]) if number <= phase[0]), len(phases) - 1)
        begin, (end, low, high) = phases[at - 1][0] if at else 0.0, phases[at]
        share = (number - begin) / (end - begin) if end != begin else 1.0
        return high + (low - high) * (1 - share if anneal_strategy == "linear" else (1 + math.cos(math.pi * share)) / 2)

    return factor


RULES: dict[Schedule, Callable[..., Rule]] = {Schedule.STEP: step, Schedule.ONE_CYCLE: one_cycle}


# Of which transformers 5.23 (optimization.py) wants one, and the words that it knows.
ONE_OF = dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), ("min_lr", "min_lr_rate"))
SHAPES = ("linear", "cosine", "1-sqrt")
WORDS = {"warmup_type": SHAPES, "decay_type": SHAPES, "mode": ("min", "max"), "threshold_mode": ("rel", "abs")}


def schedule_mistakes(run: Run) -> Iterator[str]:
    """In the kwargs of a schedule."""
    kind, given = str(run.value("lr_scheduler_type")), run.value("lr_scheduler_kwargs") or {}
    rule = RULES[Schedule(kind)] if kind in tuple(Schedule) else None
    known = parameters_of(rule, ("total",)) if rule else snapshot()["schedules"].get(kind)
    if known is None or kind.startswith("constant"):  # which take none, as is said of them
        return
    kwargs = f"and {run.said('lr_scheduler_kwargs')}" if given else "without --lr_scheduler_kwargs"
    said = f"{run.said('lr_scheduler_type')}, {kwargs}"
    if found := _fault(known, given if isinstance(given, dict) else {str(given): None}, ONE_OF.get(kind)):
        yield f"{said}: {found}. It takes {', '.join(known) or 'none'}."
    elif kind == "polynomial" and given.get("lr_end", known["lr_end"]) >= run.value("learning_rate"):
        yield f"{said}: it ends at lr_end, which must be less than {run.said('learning_rate')}."
    elif rule:
        try:
            rule(1, **given)
        except (TypeError, ValueError) as error:
            yield f"{said}: {error}."


def vain_rates(run: Run) -> Iterator[str]:
    """What is said of rates with which a run learns little, though it may be meant, as in a trial of a few steps."""
    steps, warmup = run.value("max_steps") or 0, run.value("warmup_steps") or 0
    if not run.value("do_train"):
        return
    if run.value("learning_rate") == 0:
        yield f"{run.said('learning_rate')}, so that no step changes a weight."
    elif warmup >= 1 and 0 < steps <= warmup:
        yield f"{run.said('warmup_steps')}, and {run.said('max_steps')}: the rate does not get to its full value."


def parameters_of(maker: Callable[..., Any], left_out: Container[str]) -> dict[str, Any]:
    """What a schedule may be given: by name the default, or REQUIRED."""
    every = inspect.signature(maker).parameters.values()
    empty = inspect.Parameter.empty
    return {one.name: REQUIRED if one.default is empty else one.default for one in every if one.name not in left_out}


def _fault(known: Mapping[str, Any], given: Mapping[str, Any], one_of: Sequence[str] | None) -> str:
    if unknown := [name for name in given if name not in known]:
        return f"{', '.join(unknown)} is unknown"
    if missing := [name for name, usual in known.items() if usual == REQUIRED and name not in given]:
        return f"{', '.join(missing)} is missing"
    if one_of and sum(given.get(name) is not None for name in one_of) != 1:
        return f"it needs one of {' and '.join(one_of)}"
    for name, value in given.items():
        usual = known[name]
        if name in WORDS and value not in WORDS[name]:
            return f"{name} is {value!r}, and must be one of {', '.join(WORDS[name])}"
        if isinstance(usual, bool) and not isinstance(value, bool):
            return f"{name} is {value!r}, and must be true or false"
        is_word = isinstance(usual, str | bool) and usual != REQUIRED
        if not (is_word or (value is None and usual is None) or (type(value) in (int, float) and math.isfinite(value))):
            return f"{name} is {value!r}, and must be a number"
    return ""


def rule_of(kind: Any, total: int, given: dict[str, Any] | None) -> Rule | None:
    """That of a schedule of ours for a run of `total` steps; None for one of transformers'."""
    return RULES[Schedule(kind)](total, **(given or {})) if kind in tuple(Schedule) else None
