"""Where the rows of a run's metrics lie: by step, by tokens (or samples) seen, by seconds of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from finetune.report.shapes import Point
from finetune.report.text import as_number

STEP, TOKENS, SAMPLES, SECONDS = "step", "tokens", "samples", "time"
AXES = (STEP, TOKENS, SAMPLES, SECONDS)
WORDS = {STEP: "optimizer step", TOKENS: "tokens seen", SAMPLES: "samples seen", SECONDS: "seconds of training"}


def is_summary(row: Mapping[str, Any]) -> bool:
    """The Trainer's last row, of means over the whole run."""
    return "train_runtime" in row


def places(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Of each row the place on each axis that its run can be drawn over.

    A row's `step_seconds` and its figures a second are means over the steps since the row before
    (`finetune.training.speed`), so evaluation and saving do not count as training. A run without them is timed by the
    clock of its rows.
    """
    found, at = list[dict[str, float]](), dict.fromkeys((TOKENS, SAMPLES, SECONDS), 0.0)
    last_step, clock, lost = 0.0, None, set[str]()
    for row in rows:
        step = as_number(row.get("step")) or 0.0
        if _is_training(row) and step > last_step:
            seconds = _seconds(row, step - last_step, clock)
            for axis, rate in ((SECONDS, 1.0), (TOKENS, _rate(row, "real_tokens")), (SAMPLES, _rate(row, "samples"))):
                if seconds is None or rate is None:
                    lost.add(axis)
                else:
                    at[axis] += seconds * rate
            last_step, clock = step, as_number(row.get("time"))
        found.append({STEP: step, **at})
    lost |= {axis for axis, end in at.items() if not end}
    return [{axis: place for axis, place in one.items() if axis not in lost} for one in found]


def _is_training(row: Mapping[str, Any]) -> bool:
    return not is_summary(row) and ("loss" in row or "step_seconds" in row)


def _seconds(row: Mapping[str, Any], steps: float, clock: float | None) -> float | None:
    each, now = as_number(row.get("step_seconds")), as_number(row.get("time"))
    if each is not None and each > 0:
        return each * steps
    return None if now is None else 0.0 if clock is None else max(now - clock, 0.0)


def _rate(row: Mapping[str, Any], what: str) -> float | None:
    return as_number(row.get(f"{what}_per_second"))


def envelope(points: Sequence[Point], most: int) -> tuple[list[Point], list[Point]]:
    """The lowest and the highest of at most `most` stretches, so that no peak is lost, from end to end."""
    parts = _stretches(points, most)
    places = [part[len(part) // 2][0] for part in parts]
    places[0], places[-1] = points[0][0], points[-1][0]
    lowest = [(x, min(y for _, y in part)) for x, part in zip(places, parts, strict=True)]
    return lowest, [(x, max(y for _, y in part)) for x, part in zip(places, parts, strict=True)]


def smoothed(points: Sequence[Point], most: int) -> list[Point]:
    """The means of at most `most` stretches."""
    parts = _stretches(points, most)
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _stretches(points: Sequence[Point], count: int) -> list[Sequence[Point]]:
    edges = [round(index * len(points) / count) for index in range(count + 1)]
    return [points[a:b] for a, b in pairwise(edges) if b > a]
