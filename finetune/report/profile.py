"""What `--profile` found, from profile/summary.json: where a step's time goes, by part and rank."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from finetune.drawing.html import NARROW, WIDE
from finetune.drawing.shapes import MUTED, Box, Picture, Scale, Word, ticks_below
from finetune.drawing.table import Table
from finetune.drawing.words import number, seconds_words
from finetune.report.axes import as_number
from finetune.report.blocks import Block, Drawn, Words
from finetune.report.curves import colour_of, shortened

MOST_RANKS = 8
Ranks = list[tuple[str, dict[str, float]]]  # of each rank the mean seconds a step, by part


def profile_blocks(found: dict[str, Any]) -> list[Block]:
    """Nothing for what is no profile."""
    ranks = _ranks(found.get("ranks"))
    if not ranks:
        return []
    parts = list(dict.fromkeys(part for _, seconds in ranks for part in seconds))
    steps = found.get("steps")
    words = f"Means over {len(steps)} traced steps." if isinstance(steps, list) else "Means over the traced steps."
    untraced = as_number(found.get("untraced_step_seconds"))
    if untraced is not None:
        words += f" A step that is not traced takes {seconds_words(untraced)}."
    pictures = [_bars(ranks, parts, width) for width in (WIDE, NARROW)]
    return [Drawn(pictures[0], pictures[1]), _table(ranks, parts), Words(words, "muted")]


def _ranks(found: Any) -> Ranks:
    ranks = []
    for place, rank in enumerate(found if isinstance(found, list) else []):
        steps = rank.get("steps") if isinstance(rank, dict) else None
        traced = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
        each = [parts for step in traced if isinstance(parts := step.get("parts_nanoseconds"), dict) and parts]
        if each:
            names = dict.fromkeys(str(name) for parts in each for name in parts)
            seconds = {
                name: mean(max(as_number(parts.get(name)) or 0.0, 0.0) for parts in each) * 1e-9 for name in names
            }
            ranks.append((f"rank {rank.get('rank', place)}", seconds))
    return ranks


def _table(ranks: Ranks, parts: Sequence[str]) -> Table:
    whole = mean(sum(seconds.values()) for _, seconds in ranks) or 1.0
    shown = ranks if len(ranks) <= MOST_RANKS else []
    rows = []
    for part in parts:
        times = [seconds.get(part, 0.0) for _, seconds in ranks]
        own = (_ms(seconds.get(part, 0.0)) for _, seconds in shown)
        rows.append((part.replace("_", " "), _ms(mean(times)), f"{mean(times) / whole:.1%}", _ms(max(times)), *own))
    longest = max(sum(seconds.values()) for _, seconds in ranks)
    total = ("step", _ms(whole), "100.0%", _ms(longest), *(_ms(sum(seconds.values())) for _, seconds in shown))
    columns = ("part", "mean ms", "share", "most ms", *(name for name, _ in shown))
    return Table("Where a step's time goes", columns, (*rows, total), total=len(rows))


def _ms(seconds: float) -> str:
    return number(seconds * 1e3)


def _bars(ranks: Ranks, parts: Sequence[str], width: float) -> Picture:
    alt = "; ".join(f"{part.replace('_', ' ')} {_ms(ranks[0][1].get(part, 0.0))} ms" for part in parts)
    picture = Picture("profile", "One step, by part and rank", f"{ranks[0][0]}: {alt}.", width)
    y = picture.legend([(shortened(part.replace("_", " ")), colour_of(i)) for i, part in enumerate(parts)], 0) + 6
    longest = max(sum(seconds.values()) for _, seconds in ranks)
    scale, top = Scale(0, longest * 1e3 or 1.0, 52, width - 12), y
    shapes: list[Box | Word] = []
    for name, seconds in ranks[:MOST_RANKS]:
        shapes.append(Word(0, y + 13, shortened(name, 8), colour=MUTED))
        below = 0.0
        for index, part in enumerate(parts):
            if took := seconds.get(part, 0.0) * 1e3:
                says = f"{name}, {part.replace('_', ' ')}: {number(took)} ms"
                size = max(scale(below + took) - scale(below) - 0.6, 0.3)
                shapes.append(Box(scale(below), y, size, 17, colour_of(index), says))
                below += took
        y += 22
    ticks_below(picture, scale, top, y, "milliseconds a step")
    picture.add(*shapes)
    picture.height = y + 34
    return picture
