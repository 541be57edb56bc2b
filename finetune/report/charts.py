"""Charts that several pages share: bars, timelines, a confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from finetune.report.shapes import ACCENT, GRID, INK, LIMIT, MUTED, SMALL, Box, Line, Picture, Scale, Word, letters
from finetune.report.text import as_counts, as_list, shortened

OFF_SCALE = 5.0  # times the longest bar; drawing a limit beyond that would make the bars too small to read
BOLD, HEADING = 1.12, 12.0  # times as wide; pixels
MOST_CLASSES = 40  # of a confusion matrix on a page; with more, cells are too small to see
CELL, LONG_LABEL = 34.0, 20  # pixels, letters
Legend = Sequence[tuple[str, str]]  # names and their colours


class Bar(NamedTuple):
    """Its parts, end to end, are (length, color, tooltip). `ends`: the range of the values behind it."""

    name: str
    parts: Sequence[tuple[float, str, str]]
    says: str
    group: str = ""  # the heading above all bars that share it
    ends: Sequence[float] = ()

    @property
    def length(self) -> float:
        return sum(length for length, _, _ in self.parts)


def bars(picture: Picture, rows: Sequence[Bar], words: str, legend: Legend = (),
         limit: tuple[float, str] | None = None) -> Picture:  # fmt: skip
    """Fill `picture`. `words` label the axis; `limit` is a length and its label. The text of a bar without parts has
    the limit's color."""
    y = picture.legend(legend, 0) + 6 if legend else 2.0
    most = max((value for row in rows for value in (row.length, *row.ends)), default=0.0)
    off_scale = limit is not None and limit[0] > OFF_SCALE * most
    labels = max(letters(row.name) for row in rows) + 10
    above = labels > 0.38 * picture.width  # then names go above their bars
    right = picture.width - max(letters(row.says) for row in rows) * BOLD - 10
    end = max(most, limit[0]) if limit and not off_scale else most
    scale = Scale(0, end or 1.0, 4.0 if above else labels, right)
    at = scale(limit[0]) if limit and not off_scale else picture.width
    if limit:
        told = limit[1] + (f": off the scale, {limit[0] / most:,.0f}x" if off_scale and most else "")
        picture.add(Word(at, y + 10, told, "end" if at > picture.width / 2 else "start", LIMIT, bold=True))
        y += 16
    top = y
    for group, some in groupby(rows, key=lambda row: row.group):
        if group:
            kept = shortened(group, int(picture.width / BOLD / letters("x", HEADING)))
            picture.add(Word(0, y + 13, kept, size=HEADING, bold=True))
            y += 19
        for row in some:
            name = shortened(row.name, int(picture.width / letters("x")) - 1)
            if above:
                picture.add(Word(4, y + 12, name))
                y += 17
            else:
                picture.add(Word(labels - 6, y + 13, name, "end", MUTED))
            _bar(picture, scale, y, row)
            y += 23
        y += 4 * bool(group)
    picture.ticks_below(scale, top, y, words)
    if limit and not off_scale:
        picture.add(Line(((at, top), (at, y)), LIMIT, 2, dashed=True))
    picture.height = y + 34
    return picture


def _bar(picture: Picture, scale: Scale, y: float, row: Bar) -> None:
    below = 0.0
    for length, colour, says in row.parts:
        x, end = scale(below), scale(below + length)
        gap = 1.0 if end - x > 3 and len(row.parts) > 1 else 0.0  # background between two colors
        picture.add(Box(x, y, max(end - x - gap, 0.4), 17, colour, says))
        below += length
    if len(row.ends) > 1:
        low, high, middle = scale(min(row.ends)), scale(max(row.ends)), y + 8.5
        picture.add(Line(((low, middle), (high, middle)), INK, 1.2))
        for x in (low, high):
            picture.add(Line(((x, middle - 4), (x, middle + 4)), INK, 1.2))
    beyond = scale(max((row.length, *row.ends))) + 5
    picture.add(Word(beyond, y + 13, row.says, colour=INK if row.parts else LIMIT, bold=True))


class Piece(NamedTuple):
    """A piece of a lane: start, end, color, tooltip, and the text on it."""

    start: float
    end: float
    colour: str
    says: str = ""
    text: str = ""


def timeline(picture: Picture, rows: Mapping[str, Sequence[Piece]], until: float, words: str,
             legend: Legend) -> Picture:  # fmt: skip
    """Fill `picture` with a lane per row, showing what runs when, up to `until`."""
    y = top = picture.legend(legend, 0) + 6
    across = Scale(0, until or 1.0, 52, picture.width - 6)
    for name, pieces in rows.items():
        picture.add(Word(0, y + 15, shortened(name, 8)), Box(across.start, y, across.end - across.start, 21, GRID))
        for start, end, colour, says, text in pieces:
            x, size = across(start), across(min(end, until)) - across(start)
            picture.add(Box(x, y, max(size - (0.6 if size > 3 else 0.0), 0.4), 21, colour, says))
            if text and size > letters(text) + 3:
                picture.add(Word(x + size / 2, y + 15, text, "middle", "#ffffff"))
        y += 26
    picture.ticks_below(across, top, y, words)
    picture.height = y + 34
    return picture


def confusion_picture(found: dict[str, Any], width: float, most: int = MOST_CLASSES) -> Picture | None:
    """`found` has `labels` and `counts` (rows: true labels). None if it does not, or has too many labels."""
    labels, counts = as_list(found.get("labels")), as_counts(found.get("counts"))
    if not counts or not len(labels) == len(counts) == len(counts[0]) <= most:
        return None
    names = [shortened(str(label), LONG_LABEL) for label in labels]
    right, whole = sum(row[index] for index, row in enumerate(counts)), sum(map(sum, counts))
    alt = f"{right:,} of {whole:,} are correct; rows are true labels, columns predicted ones."
    numbered = [f"{place} {name}" for place, name in enumerate(names, 1)]
    left, top = min(max(letters(name) for name in numbered) + 10, width * 0.38), 34.0
    cell = min(CELL, (width - left - 2) / len(names))
    gap, side, every = 1.0 if cell > 6 else 0.0, cell * len(names), 1 if cell >= 14 else max(5, round(30 / cell))
    picture = Picture("True labels against predicted ones", alt, width, top + side + 6)
    words = [Word(left, 12, "predicted, numbered like the rows", colour=MUTED)]
    picture.add(Box(left, top, side, side, GRID, opacity=0.5))
    for row, name in enumerate(numbered):
        y, total = top + cell * row, sum(counts[row]) or 1
        if cell >= 9 or row % every == every - 1:
            kept = shortened(name, max(int((left - 8) / letters("x")), 6))
            words.append(Word(left - 6, y + cell / 2 + 4, kept, "end"))
        if row % every == every - 1:
            size = min(SMALL, max(cell * 0.7, 7.0))
            words.append(Word(left + cell * (row + 0.5), top - 6, str(row + 1), "middle", MUTED, size))
        for column, count in enumerate(counts[row]):
            if count:
                x, share = left + cell * column, count / total
                says = f"{names[row]} predicted as {names[column]}: {count:,}, {share:.0%}"
                picture.add(Box(x, y, cell - gap, cell - gap, ACCENT, says, 0.15 + 0.55 * share))
                size = min(SMALL, cell * 0.8 / letters("x" * max(len(str(count)), 2), 1.0))
                if size >= 6:
                    words.append(Word(x + cell / 2 - 0.5, y + cell / 2 + size * 0.35, str(count), "middle", INK, size))
    picture.add(*words)
    return picture
