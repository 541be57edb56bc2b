"""What DeepSpeed's schedules and torch's take as parameters, for `make_schema`."""

from __future__ import annotations

import inspect


def schedule_parameters() -> dict[str, dict[str, list[str]]]:
    """By the schedule's name: those that it takes (`x-params`) and those that it must get (`x-required`), but for the
    optimizer."""
    from deepspeed.runtime import lr_schedules
    from torch.optim import lr_scheduler

    schedules = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    schedules |= {name: kind for name, kind in vars(lr_scheduler).items() if _is_schedule(kind)}
    taken = {name: list(inspect.signature(kind).parameters.values())[1:] for name, kind in sorted(schedules.items())}
    return {
        "x-params": {name: [parameter.name for parameter in every] for name, every in taken.items()},
        "x-required": {name: _required(every) for name, every in taken.items()},
    }


def _is_schedule(kind: object) -> bool:
    from torch.optim.lr_scheduler import LRScheduler

    is_one = isinstance(kind, type) and issubclass(kind, LRScheduler) and kind is not LRScheduler
    return is_one and not kind.__name__.startswith("_")  # type: ignore[attr-defined]


def _required(parameters: list[inspect.Parameter]) -> list[str]:
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
