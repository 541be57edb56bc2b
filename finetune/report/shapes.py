"""What pictures are made of: shapes. `finetune.report.svg` writes them as SVG and PNG.

Places and sizes are in pixels from the upper left corner. A colour is "#rrggbb", or one of the page's own (INK, ...),
which are others by day and by night.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

from finetune.report.colours import INK

LETTER = 0.58  # of the size: what a letter of a sans serif takes on average, rather more than less
SMALL, NORMAL = 11.0, 12.0
WIDE, NARROW = 860.0, 340.0  # pixels of a picture on a screen, and on a telephone
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
    """`filled`: what its points enclose."""

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
    """`anchor` is "start", "middle" or "end"; `y` that of the base line."""

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
    """`alt` says in words what is to be seen."""

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


def letters(text: str, size: float) -> float:
    """About how wide a text is."""
    return LETTER * size * len(text)


def folded(text: str, width: float, size: float = SMALL, indent: str = "    ") -> list[str]:
    """In lines of at most `width` pixels, as far as words allow."""
    most = int(width / letters("x", size))
    return textwrap.wrap(text, most, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
