"""The shapes that make up a picture. `finetune.report.svg` writes them as SVG and PNG.

Positions and sizes are in pixels from the upper left corner. A color is "#rrggbb", or one of the page's own (INK, ...),
which differ between light and dark mode.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

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
SMALL, NORMAL = 11.0, 12.0
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

    def legend(self, entries: Iterable[tuple[str, str]], y: float) -> float:
        """Add squares and their names, in as many rows as needed; returns the y below them."""
        x = 0.0
        for text, colour in entries:
            size = 18 + letters(text, SMALL) + 14
            if x and x + size > self.width:
                x, y = 0.0, y + 18
            self.add(Box(x, y, 12, 12, colour), Word(x + 17, y + 10, text))
            x += size
        return y + 18


def letters(text: str, size: float) -> float:
    """The approximate width of a text in pixels."""
    return LETTER * size * len(text)


def folded(text: str, width: float, size: float = SMALL, indent: str = "    ") -> list[str]:
    """`text` in lines of at most `width` pixels, as far as words allow."""
    most = int(width / letters("x", size))
    return textwrap.wrap(text, most, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
