"""Pictures of time: a pipeline's schedule, the layouts' throughput against their memory, scaling over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from finetune.drawing.shapes import (
    ACCENT,
    GRID,
    LIMIT,
    MUTED,
    OFF_SCALE,
    SMALL,
    Box,
    Dot,
    Line,
    Picture,
    Point,
    Scale,
    Word,
    folded,
    letters,
    ticks_below,
    ticks_left,
)
from finetune.drawing.words import GIB, gib, number, seconds_words
from finetune.plan.schedule import BACKWARD, FORWARD, IDLE, RECEIVE, SEND, Schedule

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate, Found

# As finetune.training.pipeline.schedule_plot has them.
WORK = {FORWARD: "#2a6f97", BACKWARD: "#e07a30", SEND: "#5b8c5a", RECEIVE: "#a7c957"}
MOST_WORK = 1.2  # boxes of a schedule, to a pixel of its width


def lanes(schedule: Schedule, width: float) -> Picture:
    """A pipeline's step: what each stage does when."""
    work = sorted((e for e in schedule.events if e.kind != IDLE), key=lambda e: e.start)
    end = max(event.end for event in schedule.events)
    most = int(MOST_WORK * width)
    until = end if len(work) <= most else work[most].start
    title = "The pipeline's schedule"
    lasting = seconds_words(schedule.makespan)
    alt = (f"{schedule.micro_batches} micro-batches through {schedule.stages} stages in {lasting}, "
           f"{schedule.bubble_share:.1%} of it neither forward nor backward; micro-batches in flight by stage: "
           f"{', '.join(map(str, schedule.in_flight))}.")  # fmt: skip
    if until < end:
        alt += f" Drawn are the first {seconds_words(until)}."
    picture = Picture("schedule", title, alt, width)
    kinds = [kind for kind in WORK if any(event.kind == kind for event in work)]
    y = picture.legend([*((kind, WORK[kind]) for kind in kinds), ("idle", GRID)], 0) + 6
    across = Scale(0, until * 1e3, 52, width - 6)
    for stage in range(schedule.stages):
        lane = y + 26 * stage
        picture.add(Word(0, lane + 15, f"stage {stage}"), Box(across.start, lane, across.end - across.start, 21, GRID))
    for event in work:
        if event.start >= until:
            continue
        x, size = across(event.start * 1e3), across(min(event.end, until) * 1e3) - across(event.start * 1e3)
        lane, text = y + 26 * event.stage, str(event.micro_batch)
        says = f"stage {event.stage}: {event.kind} of micro-batch {text}, {seconds_words(event.end - event.start)}"
        picture.add(Box(x, lane, max(size - (0.8 if size > 4 else 0), 0.3), 21, WORK[event.kind], says))
        if event.kind in (FORWARD, BACKWARD) and size > letters(text, 10) + 3:
            picture.add(Word(x + size / 2, lane + 14.5, text, "middle", "#ffffff", 10))
    y += 26 * schedule.stages
    ticks_below(picture, across, y, y, "milliseconds since the step began")
    picture.height = y + 34
    return picture


def throughput(found: Found, plan: Plan, width: float) -> Picture:
    """Samples a second against the peak, over all candidates. The front is numbered, and named below."""
    ahead = front(found.fitting)
    limit = plan.limit_bytes / GIB
    most = max(c.plan.peak_bytes / GIB for c in found.fitting)
    off_scale = limit > OFF_SCALE * most
    end = most * 1.1 if off_scale else limit * 1.12
    far = any(c.plan.peak_bytes / GIB > end for c in found.failing)
    alt = f"The front, from the smallest: {'; '.join(map(_described, ahead))}."
    picture = Picture("layouts", "Throughput against memory, over the layouts", alt, width)
    too_large = "does not fit" + (", or by far (at the edge)" if far else "")
    y = picture.legend([("fits", MUTED), ("on the front", ACCENT), (too_large, LIMIT)], 0) + 10
    across = Scale(0, end, 52, width - 10)
    up = _rates_scale([c.samples_per_second for c in (*found.fitting, *found.failing)], y + 230, y)
    ticks_left(picture, up, across, "samples/s" + (", not from 0" if up.low else ""))
    ticks_below(picture, across, up.end, up.start, "GiB at the peak")
    if not off_scale:
        picture.add(Line(((across(limit), up.start), (across(limit), up.end)), LIMIT, 2, dashed=True))
    _dots(picture, found, ahead, across, up)
    y += 276
    for place, one in enumerate(ahead, 1):
        for line in folded(f"{place}  {_described(one)}", width):
            picture.add(Word(0, y, line))
            y += 16
    picture.height = y
    return picture


def _rates_scale(rates: Sequence[float], start: float, end: float) -> Scale:
    """From 0, but where all rates are alike."""
    low, high = (0.0, max(rates)) if min(rates) < max(rates) / 2 else (min(rates), max(rates))
    spread = (high - low) or high
    return Scale(low and low - 0.15 * spread, high + 0.15 * spread, start, end)


def _dots(picture: Picture, found: Found, ahead: list[Candidate], across: Scale, up: Scale) -> None:
    for one in found.failing:
        held = one.plan.peak_bytes / GIB
        x = across(min(held, across.high)) - 5 * (held > across.high)
        picture.add(Dot(x, up(one.samples_per_second), LIMIT, f"{one.words}: {one.why_not}", hollow=True))
    points = [(across(c.plan.peak_bytes / GIB), up(c.samples_per_second)) for c in ahead]
    stairs = [p for a, b in pairwise(points) for p in (a, (b[0], a[1]))] + points[-1:]
    picture.add(Line(tuple(stairs), ACCENT, 1.2))
    for one in found.fitting:
        colour, radius = (ACCENT, 4.5) if one in ahead else (MUTED, 3.5)
        x, y = across(one.plan.peak_bytes / GIB), up(one.samples_per_second)
        picture.add(Dot(x, y, colour, _described(one), radius))
    _numbers(picture, points)


def _described(one: Candidate) -> str:
    return f"{one.words}: {gib(one.plan.peak_bytes)} GiB, {number(one.samples_per_second)} samples/s"


def _numbers(picture: Picture, points: list[Point]) -> None:
    """Above the dots; where these lie too close, one for several: "1-3"."""
    groups: list[list[int]] = []
    for index, (x, y) in enumerate(points):
        last = points[groups[-1][0]] if groups else (-1e9, 0.0)
        if abs(x - last[0]) < 16 and abs(y - last[1]) < 16:
            groups[-1].append(index)
        else:
            groups.append([index])
    for group in groups:
        text = str(group[0] + 1) + (f"-{group[-1] + 1}" if len(group) > 1 else "")
        x, y = min(points[index][0] for index in group), min(points[index][1] for index in group)
        picture.add(Word(x - 2, y - 8, text, "end" if len(group) > 1 else "middle", ACCENT, SMALL, bold=True))


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those than which no other is both faster and smaller (or the same), from the smallest on."""
    best: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.plan.peak_bytes, -c.samples_per_second)):
        if not best or one.samples_per_second > best[-1].samples_per_second:
            best.append(one)
    return best


def scaling_curve(points: Sequence[tuple[int, float, float]], width: float) -> Picture:
    """Samples a second over ranks, beside what ideal scaling would give; both axes are logarithmic."""
    last = points[-1]
    alt = f"At {last[0]:,} ranks {number(last[1])} samples/s, {last[1] / last[2]:.0%} of the ideal {number(last[2])}."
    picture = Picture("scaling", f"Scaling to {last[0]:,} ranks", alt, width)
    y = picture.legend([("planned", ACCENT), ("ideal", MUTED)], 0) + 10
    rates = [rate for point in points for rate in point[1:]]
    across = Scale(points[0][0], last[0], 58, width - 38, is_log=True)
    up = Scale(min(rates) / 2.5, max(rates) * 1.3, y + 220, y, is_log=True)
    ticks_left(picture, up, across, "samples/s")
    for ranks, _, _ in points:
        picture.add(Line(((across(ranks), up.start), (across(ranks), up.start + 4)), MUTED, 1))
    shown = -1e9
    for ranks, _, _ in points:
        if across(ranks) - shown > letters(f"{ranks:,}", SMALL) + 10:
            shown = across(ranks)
            picture.add(Word(shown, up.start + 17, f"{ranks:,}", "middle", MUTED))
    picture.add(Line(tuple((across(n), up(ideal)) for n, _, ideal in points), MUTED, 1.5, dashed=True))
    picture.add(Line(tuple((across(n), up(rate)) for n, rate, _ in points), ACCENT, 2))
    shown = -1e9
    for ranks, rate, ideal in points:
        x, says = across(ranks), f"{ranks:,} ranks: {number(rate)} samples/s, {rate / ideal:.0%} of the ideal"
        picture.add(Dot(x, up(rate), ACCENT, says))
        if x - shown > 40:
            shown = x
            picture.add(Word(x + 4, up(rate) + 17, f"{rate / ideal:.0%}", colour=ACCENT, bold=True))
    picture.add(Word(0, up.start + 34, "ranks; at the dots, shares of the ideal", colour=MUTED))
    picture.height = up.start + 42
    return picture
