"""Bars of the memory that ranks took."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.drawing.shapes import ACCENT, MUTED, NORMAL, Box, Picture, Scale, Word, letters, ticks_below
from finetune.drawing.words import GIB, gib
from finetune.report.curves import shortened

MOST_RANKS = 8  # of a run


def rank_bars(measured: Sequence[tuple[str, Sequence[float]]], width: float) -> Picture:
    """`measured`: a run's name and the peak of each of its ranks in bytes."""
    alt = "; ".join(f"{name}: {', '.join(gib(size) for size in sizes[:MOST_RANKS])} GiB" for name, sizes in measured)
    picture = Picture("measured-memory", "Measured memory, the peak of each rank", alt, width)
    most = max(size for _, sizes in measured for size in sizes)
    scale = Scale(0, most / GIB, 62, width - 62)
    top = y = 4.0
    shapes: list[Box | Word] = []
    for name, sizes in measured:
        if len(measured) > 1:
            kept = shortened(name, int(0.9 * width / letters("x", NORMAL)))  # bold letters are wider
            shapes.append(Word(0, y + 13, kept, size=NORMAL, bold=True))
            y += 19
        for rank in shown_ranks(sizes, MOST_RANKS):
            x = scale(sizes[rank] / GIB)
            shapes.append(Word(scale.start - 6, y + 13, f"rank {rank}", "end", MUTED))
            shapes.append(
                Box(scale.start, y, max(x - scale.start, 0.5), 17, ACCENT, f"rank {rank}: {gib(sizes[rank])} GiB")
            )
            shapes.append(Word(x + 5, y + 13, gib(sizes[rank]), bold=True))
            y += 22
        y += 4
    ticks_below(picture, scale, top, y, "GiB (2**30 bytes)")
    picture.add(*shapes)
    picture.height = y + 34
    return picture


def shown_ranks(sizes: Sequence[float], most: int) -> list[int]:
    """Of more than `most`, the first and the fullest."""
    if len(sizes) <= most:
        return list(range(len(sizes)))
    fullest = max(range(len(sizes)), key=lambda rank: sizes[rank])
    return sorted({*range(most - 1), fullest})
