"""The picture of a mixture of experts: which share of a layer's tokens each expert gets."""

from __future__ import annotations

from typing import Any

from finetune.report.shapes import ACCENT, LIMIT, MUTED, SMALL, Box, Picture, Word, letters
from finetune.report.text import as_list, as_number

MOST_LAYERS, MOST_EXPERTS = 128, 512  # of a picture; with more, cells are too small to see
CELL, LEAST_CELL = 26.0, 12.0  # pixels
FULL = 3.0  # times the mean load of its layer: the darkest cell


def load_picture(found: dict[str, Any], width: float) -> Picture | None:
    """`found` is the content of experts.json: a row per layer, a cell per expert, darker the more tokens it gets. None
    if it is not that, or if it is too large for a picture."""
    rows = _table(found.get("tokens"))
    if not rows:
        return None
    experts, names = len(rows[0]), [f"layer {place}" for place in range(1, len(rows) + 1)]
    left, top = letters(names[-1], SMALL) + 12, 22.0
    wide, high = min((width - left) / experts, 2 * CELL), CELL if len(rows) <= 24 else LEAST_CELL
    idle, every = sum(count == 0 for row in rows for count in row), len(rows) * experts
    loads = [[count * experts / (sum(row) or 1) for count in row] for row in rows]
    most = max(map(max, loads))
    alt = f"The busiest expert gets {most:.2f} times the mean of its layer; {idle:,} of {every:,} get no token."
    picture = Picture(
        "Tokens of each expert, relative to the mean of its layer", alt, width, top + high * len(rows) + 4
    )
    picture.add(Word(left, 12, f"experts 1 to {experts}; 1.0 is an equal share, red is none", colour=MUTED))
    for row, (name, shares) in enumerate(zip(names, loads, strict=True)):
        y = top + high * row
        picture.add(Word(left - 6, y + high / 2 + 4, name, "end", MUTED))
        for column, share in enumerate(shares):
            says = f"{name}, expert {column + 1}: {rows[row][column]:,} tokens, {share:.2f} of the mean"
            opacity = 0.10 + 0.60 * min(share / FULL, 1.0) if share else 0.8
            x, gap = left + wide * column, 1.0 if wide > 4 else 0.0
            picture.add(Box(x, y, wide - gap, high - 1, ACCENT if share else LIMIT, says, opacity))
            if wide >= CELL and high >= CELL:
                picture.add(Word(x + wide / 2, y + high / 2 + 4, f"{share:.1f}", "middle"))
    return picture


def _table(found: Any) -> list[list[int]]:
    """`found` as counts, if it is a table of them that has some; else nothing."""
    rows = as_list(found)
    if not 0 < len(rows) <= MOST_LAYERS or not all(isinstance(row, list) for row in rows):
        return []
    if not 0 < len(rows[0]) <= MOST_EXPERTS or any(len(row) != len(rows[0]) for row in rows):
        return []
    each = [[as_number(count) for count in row] for row in rows]
    if any(count is None or count < 0 for row in each for count in row):
        return []
    counts = [[int(count or 0) for count in row] for row in each]
    return counts if any(map(any, counts)) else []
