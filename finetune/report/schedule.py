"""A pipeline run's step, planned and measured, from its schedule.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from finetune.drawing.html import NARROW, WIDE
from finetune.plan.pages.speed_pictures import lanes
from finetune.plan.schedule import BACKWARD, FORWARD, IDLE, RECEIVE, SEND, Event, Schedule
from finetune.report.axes import as_number
from finetune.report.blocks import Block, Drawn

KINDS = [FORWARD, BACKWARD, SEND, RECEIVE, IDLE]


def schedule_pictures(found: dict[str, Any]) -> list[Block]:
    """Nothing for what is no schedule."""
    drawn: list[Block] = []
    for name in ("planned", "measured"):
        schedule = _schedule(found.get(name))
        if schedule is not None:
            wide, narrow = (
                dataclasses.replace(lanes(schedule, width), title=f"A step of the pipeline, {name}")
                for width in (WIDE, NARROW)
            )
            drawn.append(Drawn(wide, narrow, f"{name.capitalize()}: {wide.alt}"))
    return drawn


def _schedule(found: Any) -> Schedule | None:
    events = found.get("events") if isinstance(found, dict) else None
    read = [event for one in events if (event := _event(one)) is not None] if isinstance(events, list) else []
    if not read or max(event.end for event in read) <= min(event.start for event in read):
        return None
    stages = max(event.stage for event in read) + 1
    return Schedule(stages, len({event.micro_batch for event in read if event.kind == FORWARD}), tuple(read))


def _event(found: Any) -> Event | None:
    if not isinstance(found, dict):
        return None
    stage, micro = found.get("stage"), found.get("micro_batch")
    start, end = as_number(found.get("start")), as_number(found.get("end"))
    if (
        not isinstance(stage, int)
        or not isinstance(micro, int)
        or not 0 <= stage < 1024
        or start is None
        or end is None
    ):
        return None
    kind = found.get("kind")
    return Event(stage, kind, micro, start, end) if kind in KINDS and 0 <= start <= end else None
