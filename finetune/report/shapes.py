"""The shapes that make up a picture, and its axes. `finetune.report.svg` and `png` write them.

Positions and sizes are in pixels from the upper left corner. A color is "#rrggbb", or one of the page's own (INK, ...),
which differ between light and dark mode.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

from finetune.report.text import number, rounded

INK, MUTED, GRID, LIMIT, ACCENT = "ink", "muted", "grid", "limit", "accent"
# For light and dark mode: the page's own colors; s1 to s8 are for things that are compared.
NAMES = ("ink", "muted", "grid", "ground", "limit", "accent", *(f"s{index}" for index in range(1, 9)))
DAY = dict(zip(NAMES, "#1c2127 #5c6670 #dfe3e8 #ffffff #c2185b #0057b7 #0057b7 #d9730d #00844a #8e44ad #c2185b #0097a7 "
               "#8d6e3f #5c6670".split(), strict=True))  # fmt: skip
NIGHT = dict(zip(NAMES, "#e8ebee #a3adb8 #343b44 #15191e #ff6f9c #6cb6ff #6cb6ff #ffa657 #4fc98a #cf9dff #ff6f9c "
                 "#4dd0e1 #d0ad7b #a3adb8".split(), strict=True))  # fmt: skip


def colour_of(index: int) -> str:
    """The color of the `index`-th thing that is compared."""
    return f"s{index % 8 + 1}"


def variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


LETTER = 0.58  # of the font size: the average width of a sans serif letter, rounded up
SMALL = 11.0  # pixels: the usual size of letters
DASH, SPACE, RING = 5.0, 4.0, 1.5  # pixels: of a dashed line, and the width of a dot's edge
WIDE, NARROW = 860.0, 340.0  # pixels of a picture on a large screen, and on a phone
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
    """`filled`: fill the polygon of its points."""

    points: tuple[Point, ...]
    colour: str = INK
    width: float = 1.5
    dashed: bool = False
    opacity: float = 1.0
    filled: bool = False


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
    """`anchor` is "start", "middle" or "end"; `y` is that of the baseline."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = INK
    size: float = SMALL
    bold: bool = False


Shape = Box | Line | Dot | Word


@dataclass
class Picture:
    """`alt` describes the picture in words."""

    title: str
    alt: str
    width: float
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes += shapes

    def paragraph(self, text: str, y: float, colour: str = INK, bold: bool = False) -> float:
        """Add a text in as many lines as needed, the first at `y`; returns the y of the line after the last."""
        for line in folded(text, self.width * (0.9 if bold else 1)):  # bold letters are wider
            self.add(Word(0, y, line, colour=colour, bold=bold))
            y += 16
        return y

    def legend(self, entries: Iterable[tuple[str, str]], y: float) -> float:
        """Add squares and their names, in as many rows as needed; returns the y below them."""
        x = 0.0
        for text, colour in entries:
            size = 18 + letters(text) + 14
            if x and x + size > self.width:
                x, y = 0.0, y + 18
            self.add(Box(x, y, 12, 12, colour), Word(x + 17, y + 10, text))
            x += size
        return y + 18

    def ticks_below(self, scale: Scale, top: float, bottom: float, words: str) -> None:
        for value in scale.ticks(max(3, int((scale.end - scale.start) / 90))):
            x = scale(value)
            text = f"{value:,.5g}"
            beyond = x + letters(text) / 2 > self.width
            self.add(Word(self.width if beyond else x, bottom + 14, text, "end" if beyond else "middle", MUTED))
            self.shapes.insert(0, Line(((x, top), (x, bottom)), GRID, 1))  # below what is drawn already
        start = max(0.0, min(scale.start, self.width - letters(words)))  # farther left if it would be cut off
        self.add(Word(start, bottom + 29, words, colour=MUTED))

    def ticks_left(self, scale: Scale, across: Scale, words: str) -> None:
        for value in scale.ticks(4):
            y = scale(value)
            self.add(Line(((across.start, y), (across.end, y)), GRID, 1))
            self.add(Word(across.start - 5, y + 4, shortly(value), "end", MUTED))
        self.add(Word(across.end, scale.end - 4, words, "end", MUTED))


def letters(text: str, size: float = SMALL) -> float:
    """The approximate width of a text in pixels."""
    return LETTER * size * len(text)


def folded(text: str, width: float, size: float = SMALL, indent: str = "    ") -> list[str]:
    """`text` in lines of at most `width` pixels, as far as words allow."""
    most = int(width / letters("x", size))
    return textwrap.wrap(text, most, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


@dataclass(frozen=True)
class Scale:
    """Maps numbers to pixels."""

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
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [
                times * 10.0**power for power in powers for times in ((1,) if self.high / self.low > 200 else (1, 2, 5))
            ]
            return [value for value in found if self.low <= value <= self.high]
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(times * power for times in (1, 2, 5, 10) if times * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * index for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def shortly(value: float) -> str:
    """12000 as 12k: axes have little room."""
    for size, letter, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if abs(rounded(value)) >= least:
            return f"{number(value / size)}{letter}"
    return number(value)
