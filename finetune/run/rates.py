"""Learning-rate schedules that are invalid, or with which a run learns little."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.run.run import Run
from finetune.run.schedules import RULES, Schedule, parameters_of
from finetune.run.snapshot import REQUIRED, snapshot

# Kwargs of which transformers 5.23 (optimization.py) needs exactly one, and the strings that it knows.
ONE_OF = dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), ("min_lr", "min_lr_rate"))
SHAPES = ("linear", "cosine", "1-sqrt")
WORDS = {"warmup_type": SHAPES, "decay_type": SHAPES, "mode": ("min", "max"), "threshold_mode": ("rel", "abs")}


def schedule_mistakes(run: Run) -> Iterator[str]:
    """Mistakes in the kwargs of a schedule."""
    kind, given = str(run.value("lr_scheduler_type")), run.value("lr_scheduler_kwargs") or {}
    rule = RULES[Schedule(kind)] if kind in tuple(Schedule) else None
    known = parameters_of(rule, ("total",)) if rule else snapshot()["schedules"].get(kind)
    if known is None or kind.startswith("constant"):  # these take no kwargs, which void.py reports
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
    """Warnings about rates with which a run learns little; this may be intended, as in a trial of a few steps."""
    steps, warmup = run.value("max_steps") or 0, run.value("warmup_steps") or 0
    if not run.value("do_train"):
        return
    if run.value("learning_rate") == 0:
        yield f"{run.said('learning_rate')}, so no step changes a weight."
    elif warmup >= 1 and 0 < steps <= warmup:
        yield f"{run.said('warmup_steps')}, and {run.said('max_steps')}: the rate never reaches its full value."


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
            return f"{name} is {value!r}, but must be one of {', '.join(WORDS[name])}"
        if isinstance(usual, bool) and not isinstance(value, bool):
            return f"{name} is {value!r}, but must be true or false"
        is_word = isinstance(usual, str | bool) and usual != REQUIRED
        if not (is_word or (value is None and usual is None) or (type(value) in (int, float) and math.isfinite(value))):
            return f"{name} is {value!r}, but must be a number"
    return ""
