"""A confusion matrix as a picture, from the counts that a run keeps."""

from __future__ import annotations

from typing import Any

from finetune.drawing.shapes import ACCENT, INK, MUTED, SMALL, Box, Picture, Word, letters
from finetune.report.axes import as_number
from finetune.report.curves import shortened

MOST_CLASSES = 40  # beyond, cells are too small to be seen
CELL = 34.0
LONG_LABEL = 20  # letters


def confusion_picture(found: dict[str, Any], width: float) -> Picture | None:
    """`found` has `labels` and `counts` (rows: true labels). None where it is no such thing, or too large."""
    labels, counts = found.get("labels"), _counts(found.get("counts"))
    if not isinstance(labels, list) or counts is None or len(labels) != len(counts) or len(labels) > MOST_CLASSES:
        return None
    names = [shortened(str(label), LONG_LABEL) for label in labels]
    right, whole = sum(row[index] for index, row in enumerate(counts)), sum(map(sum, counts))
    alt = f"{right:,} of {whole:,} are right; rows are true labels, columns predicted ones."
    numbered = [f"{place} {name}" for place, name in enumerate(names, 1)]
    left = min(max(letters(name, SMALL) for name in numbered) + 10, width * 0.38)
    cell = min(CELL, (width - left - 2) / len(names))
    picture = Picture("confusion", "True labels against predicted ones", alt, width)
    picture.add(Word(left, 12, "predicted, numbered as the rows", colour=MUTED))
    top = 34.0
    for row, name in enumerate(numbered):
        y = top + cell * row
        kept = shortened(name, max(int((left - 8) / letters("x", SMALL)), 6))
        picture.add(Word(left - 6, y + cell / 2 + 4, kept, "end"))
        if cell >= 14 or row % 5 == 4:
            picture.add(Word(left + cell * (row + 0.5), top - 6, str(row + 1), "middle", MUTED, min(SMALL, cell * 0.7)))
        total = sum(counts[row]) or 1
        for column, count in enumerate(counts[row]):
            x, share = left + cell * column, count / total
            says = f"{names[row]} taken for {names[column]}: {count:,}, {share:.0%}"
            picture.add(Box(x, y, cell - 1, cell - 1, "grid", opacity=0.5))
            if count:
                picture.add(Box(x, y, cell - 1, cell - 1, ACCENT, says, 0.15 + 0.55 * share))
                size = min(SMALL, cell * 0.8 / max(len(str(count)), 2) / 0.58)
                if size >= 6:
                    picture.add(Word(x + cell / 2 - 0.5, y + cell / 2 + size * 0.35, str(count), "middle", INK, size))
    picture.height = top + cell * len(names) + 6
    return picture


def _counts(found: Any) -> list[list[int]] | None:
    if not isinstance(found, list) or not found:
        return None
    rows = []
    for row in found:
        if not isinstance(row, list) or len(row) != len(found):
            return None
        if any(as_number(count) is None or count < 0 for count in row):
            return None
        rows.append([int(count) for count in row])
    return rows
