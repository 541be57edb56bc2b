"""Curves over an axis, small enough for a phone; a large screen shows several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from finetune.report.shapes import Dot, Line, Picture, Point, Scale, letters, shortly
from finetune.report.text import number, shortened

STEP, TOKENS, SAMPLES, SECONDS = "step", "tokens", "samples", "time"
AXES = (STEP, TOKENS, SAMPLES, SECONDS)
WORDS = {STEP: "optimizer step", TOKENS: "tokens seen", SAMPLES: "samples seen", SECONDS: "seconds of training"}
WIDTH, HEIGHT = 420.0, 190.0  # pixels of a panel; the height is that of the curves only
POINTS = 320  # per panel, over all curves
FEWEST_POINTS = 60  # per curve, however many curves there are
DOTTED, FEW = 90, 12  # with at most so many points per panel, or per curve, each is a dot with its value as tooltip
EXTRA, MOST_EXTRA = 1.2, 4.8  # pixels of line width


@dataclass(frozen=True)
class Curve:
    """`points` by axis; y is never missing. `dashed` distinguishes a run's evaluation from its training."""

    name: str
    colour: str
    points: Mapping[str, Sequence[Point]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    curves: tuple[Curve, ...]
    keyed: bool = False  # whether it needs its own legend besides the common one
    is_main: bool = False  # it takes the full width of a screen

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that every curve has."""
        return tuple(axis for axis in AXES if all(curve.points.get(axis) for curve in self.curves))


def draw(panel: Panel, axis: str, width: float = WIDTH, *, with_key: bool = False) -> Picture:
    """Draw a panel over one of its axes. `with_key`: add a legend, for a picture that stands alone."""
    alt = "; ".join(_said(curve, axis) for curve in panel.curves[:12])
    picture = Picture(panel.title, f"{panel.title} over {WORDS[axis]}. {alt}.", width)
    y = 4.0
    if with_key or panel.keyed:
        y = picture.legend([(shortened(curve.name), curve.colour) for curve in panel.curves], 0) + 2
    y += 12
    across, up = _scales(panel, axis, y, width)
    picture.ticks_left(up, across, "")
    picture.ticks_below(across, up.start, up.start, WORDS[axis])
    each = max(FEWEST_POINTS, POINTS // len(panel.curves))
    dotted = sum(len(curve.points[axis]) for curve in panel.curves) <= DOTTED
    for place, curve in enumerate(panel.curves):
        # Later curves are thinner, so that each of several identical ones is visible.
        above = sum(other.dashed == curve.dashed for other in panel.curves[place + 1 :])
        points = curve.points[axis]
        _add(picture, curve, points, across, up, each, min(EXTRA * above, MOST_EXTRA))
        radius = 3.0 if curve.dashed or len(points) == 1 else 2.0
        for x, y in points if dotted or len(points) <= FEW else ():
            picture.add(Dot(across(x), up(y), curve.colour, f"{curve.name}: {number(y)} at {number(x)}", radius))
    picture.height = up.start + 34
    return picture


def _scales(panel: Panel, axis: str, top: float, width: float) -> tuple[Scale, Scale]:
    points = [point for curve in panel.curves for point in curve.points[axis]]
    low, high = min(y for _, y in points), max(y for _, y in points)
    if 0 < low < high / 3:
        low = 0.0
    room = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
    start, end = min(x for x, _ in points), max(x for x, _ in points)
    if 0 < start < end / 5:
        start = 0.0
    bottom = low if low == 0 else low - room
    up = Scale(bottom, high + room, top + HEIGHT, top)
    left = 8 + max(letters(shortly(value)) for value in (*up.ticks(4), 1000))
    if start == end:
        start, end = min(0.0, start), max(1.0, end)
    return Scale(start, end, left, width - 12), up


def _add(picture: Picture, curve: Curve, points: Sequence[Point], across: Scale, up: Scale, each: int,
         extra: float) -> None:  # fmt: skip
    """Draw a curve; with too many points, draw their means over a faint band of their range."""

    def placed(some: Sequence[Point]) -> tuple[Point, ...]:
        return tuple((across(x), up(y)) for x, y in some)

    is_dense = len(points) > each
    if is_dense:
        lowest, highest = envelope(points, max(each // 2, 24))
        picture.add(Line((*placed(lowest), *reversed(placed(highest))), curve.colour, opacity=0.25, filled=True))
    if len(points) > 1:
        shown = smoothed(points, max(each // 4, 12)) if is_dense else points
        picture.add(Line(placed(shown), curve.colour, (2 if is_dense else 1.8) + extra, curve.dashed))


def _said(curve: Curve, axis: str) -> str:
    values = [y for _, y in curve.points[axis]]
    if len(values) == 1:
        return f"{curve.name}: {number(values[0])}"
    ends = f"from {number(values[0])} to {number(values[-1])}"
    return f"{curve.name}: {ends}, lowest {number(min(values))}, highest {number(max(values))}"


def envelope(points: Sequence[Point], most: int) -> tuple[list[Point], list[Point]]:
    """The minima and maxima of at most `most` stretches, from end to end, so that no peak is lost."""
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
