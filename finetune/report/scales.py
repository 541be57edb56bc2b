"""Axes: scales from numbers to pixels, and their ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune.report.shapes import GRID, MUTED, SMALL, Line, Picture, Word, letters


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


def ticks_below(picture: Picture, scale: Scale, top: float, bottom: float, words: str) -> None:
    for value in scale.ticks(max(3, int((scale.end - scale.start) / 90))):
        x = scale(value)
        text = f"{value:,.5g}"
        beyond = x + letters(text, SMALL) / 2 > picture.width
        word = Word(picture.width if beyond else x, bottom + 14, text, "end" if beyond else "middle", MUTED)
        picture.add(Line(((x, top), (x, bottom)), GRID, 1), word)
    start = max(0.0, min(scale.start, picture.width - letters(words, SMALL)))  # farther left if it would be cut off
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
