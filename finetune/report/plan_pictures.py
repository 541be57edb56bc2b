"""Charts of a plan: memory by kind and over a step, a pipeline's schedule, the layouts, scaling over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from finetune.plan.schedule import BACKWARD, FORWARD, IDLE, RECEIVE, SEND, Schedule
from finetune.report.charts import OFF_SCALE, Bar, Piece, bars, timeline
from finetune.report.plan_words import COLOURS, in_order, moment_words, rank_kinds
from finetune.report.shapes import ACCENT, GRID, INK, LIMIT, MUTED, Box, Dot, Line, Picture, Point, Scale, Word, letters
from finetune.report.text import GIB, Unit, gib, number, seconds_words, spelled

if TYPE_CHECKING:
    from finetune.plan.memory import RankMemory
    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate, Found

OTHER = "#8c8c8c"  # for an unknown kind
PHASES = {"forward": "#2a6f97", "backward": "#e07a30", "optimizer": "#5b8c5a", "saving": "#8e6bbf"}
WORK = {FORWARD: "#2a6f97", BACKWARD: "#e07a30", SEND: "#5b8c5a", RECEIVE: "#a7c957"}
MOST_WORK = 1.2  # boxes of a schedule per pixel of its width


def by_kind(name: str, held: dict[str, int], unit: Unit = gib, group: str = "") -> Bar:
    parts = [
        (held[kind] / unit.size, COLOURS.get(kind, OTHER), f"{spelled(kind)}{f' {name}' if group else ''}: "
         f"{unit.said(held[kind])}") for kind in in_order(held) if held[kind]
    ]  # fmt: skip
    return Bar(name, parts, unit(sum(held.values())), group)


def kind_legend(of: Sequence[dict[str, int]]) -> list[tuple[str, str]]:
    kinds = in_order({kind for held in of for kind, size in held.items() if size})
    return [(spelled(kind), COLOURS.get(kind, OTHER)) for kind in kinds]


def memory_bars(plan: Plan, title: str, width: float) -> Picture:
    alt = "; ".join(
        f"{name}: {gib(rank.resident_bytes)} GiB at rest, {gib(rank.peak.bytes)} at the peak, which is in "
        f"{moment_words(rank.peak)}" for name, rank in rank_kinds(plan)
    )  # fmt: skip
    held = {(name, when): kinds for name, rank in rank_kinds(plan)
            for when, kinds in (("at rest", rank.resident), ("at peak", rank.peak.by_kind))}  # fmt: skip
    return _bars(Picture(title, f"{alt}; limit {gib(plan.limit_bytes)} GiB.", width), held, plan.limit_bytes)


def host_bars(plan: Plan, width: float) -> Picture:
    alt = f"A node's ranks use {gib(plan.host_bytes)} GiB of its host's {gib(plan.host_limit_bytes)} GiB."
    held = {("a node", "host"): plan.host}
    return _bars(Picture("Memory of a node's host, by kind", alt, width), held, plan.host_limit_bytes)


def _bars(picture: Picture, held: dict[tuple[str, str], dict[str, int]], limit: int) -> Picture:
    rows = [by_kind(when, kinds, group=name) for (name, when), kinds in held.items()]
    return bars(picture, rows, gib.words, kind_legend(list(held.values())), (limit / GIB, f"limit {gib(limit)} GiB"))


def memory_over_time(plan: Plan, width: float) -> Picture:
    """The fullest rank's memory after each part of the model, and its peak, which may be between two parts."""
    rank = plan.fullest
    name = next(name for name, one in rank_kinds(plan) if one.peak.bytes == rank.peak.bytes)
    peak, steps = rank.step_peak, rank.timeline
    alt = f"From {gib(rank.resident_bytes)} GiB between steps to {gib(peak.bytes)} GiB in {moment_words(peak)}."
    picture = Picture(f"Memory over a step, {name}", alt, width)
    y = picture.legend([(phase, PHASES.get(phase, OTHER)) for phase in dict.fromkeys(p for p, _, _ in steps)], 0) + 8
    limit, off_scale = plan.limit_bytes / GIB, plan.limit_bytes > OFF_SCALE * peak.bytes
    most = peak.bytes / GIB * 1.08 if off_scale else max(peak.bytes / GIB * 1.08, limit * 1.04)
    across, up = Scale(0, len(steps), 46, width - 8), Scale(0, most, y + 200, y)
    at = 0
    for phase, run in groupby(steps, key=lambda step: step[0]):
        count = len(list(run))
        picture.add(Box(across(at), y, across(at + count) - across(at), 200, PHASES.get(phase, OTHER), phase, 0.16))
        at += count
    picture.ticks_left(up, across, "GiB")
    points = [(across(0), up(rank.resident_bytes / GIB))]
    for index, (_, _, size) in enumerate(steps):
        points += [(across(index + 0.5), points[-1][1]), (across(index + 0.5), up(size / GIB))]
    picture.add(Line((*points, (across(len(steps)), points[-1][1])), INK, 1.6 if 4 * len(steps) < width else 0.8))
    place = peak_index(rank)
    x, height, words = across(place + 0.5), up(peak.bytes / GIB), f"peak {gib(peak.bytes)} GiB: {moment_words(peak)}"
    picture.add(Line(((x, up(steps[place][2] / GIB)), (x, height)), ACCENT, 1.2, dashed=True))
    picture.add(Dot(x, height, ACCENT, words))
    if not off_scale:
        picture.add(Line(((across.start, up(limit)), (across.end, up(limit))), LIMIT, 2, dashed=True))
        says = f"limit {gib(plan.limit_bytes)} GiB"
        picture.add(Word(across.start + 4, up(limit) - 4, says, colour=LIMIT, bold=True))
    picture.add(Word(0, y + 222, "parts of the model, in the order in which they run", colour=MUTED))
    picture.height = picture.paragraph(words, y + 240, ACCENT, bold=True) - 8
    return picture


def peak_index(rank: RankMemory) -> int:
    """The index of the peak in the timeline: at the part that it names, else where its phase uses the most memory."""
    peak, steps = rank.step_peak, rank.timeline
    part = peak.where.rpartition(" of ")[2]
    same = [i for i, (phase, _, _) in enumerate(steps) if phase == peak.phase] or list(range(len(steps)))
    named = [i for i in same if steps[i][1] and steps[i][1] == part]
    return max(named or same, key=lambda index: steps[index][2])


def lanes(schedule: Schedule, title: str, width: float) -> Picture:
    work = sorted((event for event in schedule.events if event.kind != IDLE), key=lambda event: event.start)
    end, most = max(event.end for event in schedule.events), int(MOST_WORK * width)
    until = end if len(work) <= most else work[most].start
    alt = (f"{schedule.micro_batches} micro-batches through {schedule.stages} stages in "
           f"{seconds_words(schedule.makespan)}, {schedule.bubble_share:.1%} of it neither forward nor backward; "
           f"micro-batches in flight by stage: {', '.join(map(str, schedule.in_flight))}.")  # fmt: skip
    if until < end:
        alt += f" The chart shows the first {seconds_words(until)}."
    rows: dict[str, list[Piece]] = {f"stage {stage}": [] for stage in range(schedule.stages)}
    for one in work:
        if one.start < until:
            says = f"{one.kind} of micro-batch {one.micro_batch}, {seconds_words(one.end - one.start)}"
            text = str(one.micro_batch) if one.kind in (FORWARD, BACKWARD) else ""
            piece = Piece(one.start * 1e3, one.end * 1e3, WORK[one.kind], f"stage {one.stage}: {says}", text)
            rows[f"stage {one.stage}"].append(piece)
    legend = [(kind, WORK[kind]) for kind in WORK if any(event.kind == kind for event in work)]
    words = "milliseconds since the start of the step"
    return timeline(Picture(title, alt, width), rows, until * 1e3, words, [*legend, ("idle", GRID)])


def throughput(found: Found, plan: Plan, width: float) -> Picture:
    """Samples per second against the peak, for all candidates. The Pareto front is numbered, and listed below."""
    ahead, limit = front(found.fitting), plan.limit_bytes / GIB
    most = max(c.plan.peak_bytes / GIB for c in found.fitting)
    off_scale = limit > OFF_SCALE * most
    end = most * 1.1 if off_scale else limit * 1.12
    far = any(c.plan.peak_bytes / GIB > end for c in found.failing)
    alt = f"The Pareto front, from the smallest: {'; '.join(map(_described, ahead))}."
    picture = Picture("Throughput against memory, over the layouts", alt, width)
    too_large = "does not fit" + (" (at the edge: by far)" if far else "")
    y = picture.legend([("fits", MUTED), ("on the front", ACCENT), (too_large, LIMIT)], 0) + 10
    across = Scale(0, end, 52, width - 10)
    up = _rates_scale([c.samples_per_second for c in (*found.fitting, *found.failing)], y + 230, y)
    picture.ticks_left(up, across, "samples/s" + (", not from 0" if up.low else ""))
    picture.ticks_below(across, up.end, up.start, "GiB at the peak")
    if not off_scale:
        picture.add(Line(((across(limit), up.start), (across(limit), up.end)), LIMIT, 2, dashed=True))
    _dots(picture, found, ahead, across, up)
    y += 276
    for place, one in enumerate(ahead, 1):
        y = picture.paragraph(f"{place}  {_described(one)}", y)
    picture.height = y
    return picture


def _rates_scale(rates: Sequence[float], start: float, end: float) -> Scale:
    """From 0, unless all rates are similar."""
    low, high = (0.0, max(rates)) if min(rates) < max(rates) / 2 else (min(rates), max(rates))
    extent = (high - low) or high
    return Scale(low and low - 0.15 * extent, high + 0.15 * extent, start, end)


def _dots(picture: Picture, found: Found, ahead: list[Candidate], across: Scale, up: Scale) -> None:
    for one in found.failing:
        held = one.plan.peak_bytes / GIB
        x = across(min(held, across.high)) - 5 * (held > across.high)
        picture.add(Dot(x, up(one.samples_per_second), LIMIT, f"{one.words}: {one.plan.why_not}", hollow=True))
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
    """Numbers above the dots; where dots are too close, one for several, as in "1-3"."""
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
        picture.add(Word(x - 2, y - 8, text, "end" if len(group) > 1 else "middle", ACCENT, bold=True))


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The Pareto front: those that no other beats in both speed and memory, from the smallest on."""
    best: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.plan.peak_bytes, -c.samples_per_second)):
        if not best or one.samples_per_second > best[-1].samples_per_second:
            best.append(one)
    return best


def scaling_curve(points: Sequence[tuple[int, float, float]], width: float) -> Picture:
    """Samples per second over ranks, beside ideal scaling; both axes are logarithmic."""
    last = points[-1]
    alt = f"At {last[0]:,} ranks {number(last[1])} samples/s, {last[1] / last[2]:.0%} of the ideal {number(last[2])}."
    picture = Picture(f"Scaling to {last[0]:,} ranks", alt, width)
    y = picture.legend([("planned", ACCENT), ("ideal", MUTED)], 0) + 10
    rates = [rate for point in points for rate in point[1:]]
    across = Scale(points[0][0], last[0], 58, width - 38, is_log=True)
    up = Scale(min(rates) / 2.5, max(rates) * 1.3, y + 220, y, is_log=True)
    picture.ticks_left(up, across, "samples/s")
    for ranks, _, _ in points:
        picture.add(Line(((across(ranks), up.start), (across(ranks), up.start + 4)), MUTED, 1))
    shown = -1e9
    for ranks, _, _ in points:
        if across(ranks) - shown > letters(f"{ranks:,}") + 10:
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
    picture.add(Word(0, up.start + 34, "ranks; at the dots, percent of the ideal", colour=MUTED))
    picture.height = up.start + 42
    return picture
