"""Pictures of memory: by kind, on the device and on the host, and over a step."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from finetune.drawing.shapes import (
    ACCENT,
    INK,
    LIMIT,
    MUTED,
    NORMAL,
    OFF_SCALE,
    Box,
    Dot,
    Line,
    Picture,
    Scale,
    Shape,
    Word,
    folded,
    ticks_below,
    ticks_left,
)
from finetune.drawing.words import GIB, gib, spelled
from finetune.plan.engines.pipeline import PIPE
from finetune.plan.engines.resident import BUCKETS, GATHERED, GRADIENTS, MASTERS, PARAMETERS, STATES
from finetune.plan.memory import BATCH, BUFFERS, SAVED, WORKSPACE
from finetune.plan.pages.kinds import in_order, rank_kinds
from finetune.plan.pages.words import moment_words
from finetune.plan.program import ACTIVATIONS, GRADIENTS_FLOW, TEMPORARY

if TYPE_CHECKING:
    from finetune.plan.memory import RankMemory
    from finetune.plan.plan import Plan

# Any two are at least 18 apart in CIELAB, also as people see them who lack one kind of cone (Machado et al., "A
# Physiologically-based Model for Simulation of Color Vision Deficiency", 2009); a test computes it.
COLOURS = {
    PARAMETERS: "#0a4dd4", GATHERED: "#22abf4", MASTERS: "#b376a8", STATES: "#00844a", GRADIENTS: "#db941e",
    BUCKETS: "#882255", PIPE: "#60ea9c", ACTIVATIONS: "#b51500", GRADIENTS_FLOW: "#f0e442",
    TEMPORARY: "#abaa59", BATCH: "#d1cefc", WORKSPACE: "#83ad91", BUFFERS: "#734a9a", SAVED: "#fc36d8",
}  # fmt: skip
OTHER = "#8c8c8c"  # a kind that is not among them
PHASES = {"forward": "#2a6f97", "backward": "#e07a30", "optimizer": "#5b8c5a", "saving": "#8e6bbf"}
Bars = list[tuple[str, list[tuple[str, dict[str, int]]]]]


def memory_bars(plan: Plan, width: float) -> Picture:
    bars = [(name, [("at rest", rank.resident), ("at peak", rank.peak.by_kind)]) for name, rank in rank_kinds(plan)]
    alt = "; ".join(
        f"{name}: {gib(rank.resident_bytes)} GiB at rest, {gib(rank.peak.bytes)} at the peak, which is in "
        f"{moment_words(rank.peak)}" for name, rank in rank_kinds(plan)
    )  # fmt: skip
    title = "Memory of the device, by kind"
    return _bars(Picture("memory", title, f"{alt}; limit {gib(plan.limit_bytes)} GiB.", width), bars, plan.limit_bytes)


def host_bars(plan: Plan, width: float) -> Picture:
    alt = f"A node's ranks hold {gib(plan.host_bytes)} GiB of the {gib(plan.host_limit_bytes)} GiB of its host."
    bars = [("a node", [("host", plan.host)])]
    return _bars(Picture("host", "Memory of a node's host, by kind", alt, width), bars, plan.host_limit_bytes)


def _bars(picture: Picture, bars: Bars, limit: int) -> Picture:
    most = max(sum(held.values()) for _, group in bars for _, held in group)
    off_scale = limit > OFF_SCALE * most
    left, right = 66.0, 68.0
    scale = Scale(0, max((most if off_scale else max(limit, most)) / GIB, 1e-6), left, picture.width - right)
    kinds = in_order({kind for _, group in bars for _, held in group for kind, size in held.items() if size})
    y = picture.legend([(spelled(kind), COLOURS.get(kind, OTHER)) for kind in kinds], 0) + 6
    words = f"limit {gib(limit)} GiB" + (f": off the scale, {limit / max(most, 1):,.0f}x" if off_scale else "")
    at = picture.width if off_scale else scale(limit / GIB)
    anchor = "end" if at > picture.width / 2 else "start"
    picture.add(Word(at, y + 10, words, anchor, LIMIT, bold=True))
    top = y = y + 16
    shapes: list[Shape] = []
    for name, group in bars:
        shapes.append(Word(0, y + 13, name, size=NORMAL, bold=True))
        y += 19
        for label, held in group:
            shapes += _bar(scale, y, label, held, kinds)
            y += 23
        y += 4
    ticks_below(picture, scale, top, y, "GiB (2**30 bytes)")
    picture.add(*shapes)
    if not off_scale:
        picture.add(Line(((at, top), (at, y)), LIMIT, 2, dashed=True))
    picture.height = y + 34
    return picture


def _bar(scale: Scale, y: float, label: str, held: dict[str, int], kinds: list[str]) -> list[Shape]:
    shapes: list[Shape] = [Word(scale.start - 6, y + 13, label, "end", MUTED)]
    below = 0
    for kind in kinds:
        if size := held.get(kind, 0):
            x, end = scale(below / GIB), scale((below + size) / GIB)
            gap = 1.0 if end - x > 3 else 0.0  # the ground between two colours
            title = f"{spelled(kind)} {label}: {gib(size)} GiB"
            shapes.append(Box(x, y, max(end - x - gap, 0.4), 18, COLOURS.get(kind, OTHER), title))
            below += size
    shapes.append(Word(scale(below / GIB) + 5, y + 13, gib(below), bold=True))
    return shapes


def memory_over_time(plan: Plan, width: float) -> Picture:
    """Of the fullest rank: its memory behind each part of the model, and the peak, which may lie between two."""
    rank = plan.fullest
    name = next(name for name, one in rank_kinds(plan) if one.peak.bytes == rank.peak.bytes)
    peak, steps = rank.step_peak, rank.timeline
    title = f"Memory over a step, {name}"
    alt = f"From {gib(rank.resident_bytes)} GiB between steps to {gib(peak.bytes)} GiB in {moment_words(peak)}."
    picture = Picture("time", title, alt, width)
    y = picture.legend([(phase, PHASES.get(phase, OTHER)) for phase in dict.fromkeys(p for p, _, _ in steps)], 0) + 8
    limit, off_scale = plan.limit_bytes / GIB, plan.limit_bytes > OFF_SCALE * peak.bytes
    most = peak.bytes / GIB * 1.08 if off_scale else max(peak.bytes / GIB * 1.08, limit * 1.04)
    across, up = Scale(0, len(steps), 46, width - 8), Scale(0, most, y + 200, y)
    at = 0
    for phase, run in groupby(steps, key=lambda step: step[0]):
        count = len(list(run))
        picture.add(Box(across(at), y, across(at + count) - across(at), 200, PHASES.get(phase, OTHER), phase, 0.16))
        at += count
    ticks_left(picture, up, across, "GiB")
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
    lines = folded(words, 0.9 * width)  # bold letters are wider
    picture.add(*(Word(0, y + 240 + 16 * i, line, colour=ACCENT, bold=True) for i, line in enumerate(lines)))
    picture.height = y + 232 + 16 * len(lines)
    return picture


def peak_index(rank: RankMemory) -> int:
    """Where in its timeline the peak lies: at the place of its name, else where its phase holds the most."""
    peak, steps = rank.step_peak, rank.timeline
    part = peak.where.rpartition(" of ")[2]
    same = [i for i, (phase, _, _) in enumerate(steps) if phase == peak.phase] or list(range(len(steps)))
    named = [i for i in same if steps[i][1] and steps[i][1] == part]
    return max(named or same, key=lambda index: steps[index][2])
