"""What pictures are made of: shapes, scales and ticks. `finetune.drawing.render` writes them as SVG and PNG.

Places and sizes are in pixels from the upper left corner. A colour is "#rrggbb", or one of the page's own (INK, ...),
which are others by day and by night.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

INK, MUTED, GRID, LIMIT, ACCENT = "ink", "muted", "grid", "limit", "accent"
LETTER = 0.58  # of the size: what a letter of a sans serif takes on average, rather more than less
SMALL, NORMAL = 11.0, 12.0
OFF_SCALE = 5.0  # times the peak, from where on the limit would make the bars too small to be read
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Line:
    points: tuple[Point, ...]
    colour: str = INK
    width: float = 1.5
    dashed: bool = False
    opacity: float = 1.0


@dataclass(frozen=True)
class Area:
    """What its points enclose."""

    points: tuple[Point, ...]
    colour: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Dot:
    """`hollow`: a ring."""

    x: float
    y: float
    colour: str
    title: str
    radius: float = 4.0
    hollow: bool = False


@dataclass(frozen=True)
class Word:
    """`anchor` is "start", "middle" or "end"; `y` that of the base line."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = INK
    size: float = SMALL
    bold: bool = False

    @property
    def width(self) -> float:
        return letters(self.text, self.size)


Shape = Box | Line | Area | Dot | Word


@dataclass
class Picture:
    """`alt` says in words what is to be seen."""

    name: str
    title: str
    alt: str
    width: float
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes += shapes

    def legend(self, entries: Iterable[tuple[str, str]], y: float) -> float:
        """Squares and their names, in as many rows as it takes; where it ends."""
        x = 0.0
        for text, colour in entries:
            size = 18 + letters(text, SMALL) + 14
            if x and x + size > self.width:
                x, y = 0.0, y + 18
            self.add(Box(x, y, 12, 12, colour), Word(x + 17, y + 10, text))
            x += size
        return y + 18


@dataclass(frozen=True)
class Scale:
    """From numbers to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers: multiples of 1, 2 or 5 times a power of ten."""
        if self.is_log:
            return [v for v in _decades(self.low, self.high) if self.low <= v <= self.high]
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(times * power for times in (1, 2, 5, 10) if times * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high / low > 200 else (1, 2, 5)
    return [times * 10.0**power for power in powers for times in steps]


def ticks_below(picture: Picture, scale: Scale, top: float, bottom: float, words: str) -> None:
    for value in scale.ticks(max(3, int((scale.end - scale.start) / 90))):
        x = scale(value)
        text = f"{value:,.5g}"
        beyond = x + letters(text, SMALL) / 2 > picture.width
        word = Word(picture.width if beyond else x, bottom + 14, text, "end" if beyond else "middle", MUTED)
        picture.add(Line(((x, top), (x, bottom)), GRID, 1), word)
    start = max(0.0, min(scale.start, picture.width - letters(words, SMALL)))  # farther left where it would be cut off
    picture.add(Word(start, bottom + 29, words, colour=MUTED))


def ticks_left(picture: Picture, scale: Scale, across: Scale, words: str) -> None:
    for value in scale.ticks(4):
        y = scale(value)
        picture.add(Line(((across.start, y), (across.end, y)), GRID, 1))
        picture.add(Word(across.start - 5, y + 4, shortly(value), "end", MUTED))
    picture.add(Word(across.end, scale.end - 4, words, "end", MUTED))


def shortly(value: float) -> str:
    """12000 as 12k: axes have little room."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (letter != "k" and value >= size):
            return f"{value / size:,.4g}{letter}"
    return f"{value:,.4g}"


def letters(text: str, size: float) -> float:
    """About how wide a text is."""
    return LETTER * size * len(text)


def folded(text: str, width: float, size: float = SMALL, indent: str = "    ") -> list[str]:
    """In lines of at most `width` pixels, as far as words allow."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and letters(f"{lines[-1]} {word}", size) > width:
            lines.append(indent + word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
