"""Charts of a run: its ranks' memory, where a profiled step's time went, a pipeline's schedule, which
share of a layer's tokens each expert gets."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from finetune.plan.schedule import FORWARD, IDLE, Event, Schedule
from finetune.report.charts import Bar, bars
from finetune.report.page import Block, drawn
from finetune.report.plan_pictures import WORK, lanes
from finetune.report.shapes import ACCENT, LIMIT, MUTED, Box, Picture, Word, colour_of, letters
from finetune.report.table import Table
from finetune.report.text import (
    GIB,
    as_counts,
    as_dict,
    as_list,
    as_number,
    gib,
    number,
    seconds_words,
    shortened,
    spelled,
)

MOST_RANKS, MOST_LABELS, MOST_STAGES = 8, 60, 1024  # shown of a run
Ranks = Sequence[tuple[str, dict[str, float]]]  # each rank's mean seconds per step, by part


def rank_bars(measured: Sequence[tuple[str, Sequence[float]]], named: bool, width: float) -> Picture:
    """`measured`: each run's name, and the peak of each of its ranks in bytes. `named`: show the names."""
    alt = "; ".join(f"{name}: {', '.join(map(gib, sizes[:MOST_RANKS]))} GiB" for name, sizes in measured)
    rows = [Bar(f"rank {rank}", [(sizes[rank] / GIB, ACCENT, f"rank {rank}: {gib.said(sizes[rank])}")],
                gib(sizes[rank]), name if named else "")
            for name, sizes in measured for rank in shown_ranks(sizes, MOST_RANKS)]  # fmt: skip
    return bars(Picture("Measured memory, the peak of each rank", alt, width), rows, gib.words)


def shown_ranks(sizes: Sequence[float], most: int) -> list[int]:
    """All ranks; of more than `most`, the first ones and the fullest."""
    if len(sizes) <= most:
        return list(range(len(sizes)))
    fullest = max(range(len(sizes)), key=lambda rank: sizes[rank])
    return sorted({*range(most - 1), fullest})


def share_bars(rows: Sequence[dict[str, Any]], width: float) -> Picture:
    """Precision, recall and F1 of each label, and how often it occurs."""
    names = ("precision", "recall", "f1")
    each = [Bar(name, [(row[name], colour_of(place), "")], f"{row[name]:.2f}", f"{row['label']} ({row['support']:,})")
            for row in rows[:MOST_LABELS] for place, name in enumerate(names)]  # fmt: skip
    return bars(Picture("Precision, recall and F1", "", width), each, "share")


def profile_blocks(found: dict[str, Any]) -> list[Block]:
    """The result of `--profile`, from profile/summary.json; nothing if that is not a profile."""
    ranks = _ranks(found.get("ranks"))
    if not ranks:
        return []
    steps = found.get("steps")
    words = f"Means over {len(steps)} traced steps." if isinstance(steps, list) else "Means over the traced steps."
    untraced = as_number(found.get("untraced_step_seconds"))
    if untraced is not None:
        words += f" An untraced step takes {seconds_words(untraced)}."
    return [*drawn(part_bars, ranks), Block("table", part_table(ranks)), Block("muted", words)]


def _ranks(found: Any) -> Ranks:
    ranks = []
    for place, rank in enumerate(map(as_dict, as_list(found))):
        steps = map(as_dict, as_list(rank.get("steps")))
        if each := [parts for step in steps if (parts := as_dict(step.get("parts_nanoseconds")))]:
            names = dict.fromkeys(str(name) for parts in each for name in parts)
            seconds = {
                name: mean(max(as_number(parts.get(name)) or 0.0, 0.0) for parts in each) * 1e-9 for name in names
            }
            ranks.append((f"rank {rank.get('rank', place)}", seconds))
    return ranks


def _parts(ranks: Ranks) -> list[str]:
    return list(dict.fromkeys(part for _, seconds in ranks for part in seconds))


def part_table(ranks: Ranks) -> Table:
    whole = mean(sum(seconds.values()) for _, seconds in ranks) or 1.0
    shown = ranks if len(ranks) <= MOST_RANKS else []
    rows = []
    for part in _parts(ranks):
        times = [seconds.get(part, 0.0) for _, seconds in ranks]
        own = (_ms(seconds.get(part, 0.0)) for _, seconds in shown)
        rows.append((spelled(part), _ms(mean(times)), f"{mean(times) / whole:.1%}", _ms(max(times)), *own))
    longest = max(sum(seconds.values()) for _, seconds in ranks)
    total = ("step", _ms(whole), "100.0%", _ms(longest), *(_ms(sum(seconds.values())) for _, seconds in shown))
    columns = ("part", "mean ms", "share", "most ms", *(name for name, _ in shown))
    return Table("Where a step's time goes", columns, (*rows, total), total=len(rows))


def part_bars(ranks: Ranks, width: float, title: str = "One step, by part and rank") -> Picture:
    names, (first, mine) = _parts(ranks), ranks[0]
    alt = "; ".join(f"{spelled(part)} {_ms(mine.get(part, 0.0))} ms" for part in names)
    rows = [
        Bar(shortened(name, 8), [(took * 1e3, colour_of(names.index(part)), f"{name}, {spelled(part)}: {_ms(took)} ms")
                                 for part, took in seconds.items() if took], _ms(sum(seconds.values())))
        for name, seconds in ranks[:MOST_RANKS]
    ]  # fmt: skip
    legend = [(shortened(spelled(part)), colour_of(index)) for index, part in enumerate(names)]
    return bars(Picture(title, f"{first}: {alt}.", width), rows, "milliseconds per step", legend)


def _ms(seconds: float) -> str:
    return number(seconds * 1e3)


def schedule_blocks(found: dict[str, Any]) -> list[Block]:
    """A pipeline's step, planned and measured, from schedule.json; nothing if that is not a schedule."""
    blocks = []
    for name in ("planned", "measured"):
        if schedule := _schedule(found.get(name)):
            blocks += drawn(lanes, schedule, f"A step of the pipeline, {name}", caption=True)
    return blocks


def _schedule(found: Any) -> Schedule | None:
    events = as_list(as_dict(found).get("events"))
    read = [event for one in events if (event := _event(one)) is not None]
    if not read or max(event.end for event in read) <= min(event.start for event in read):
        return None
    stages = max(event.stage for event in read) + 1
    return Schedule(stages, len({event.micro_batch for event in read if event.kind == FORWARD}), tuple(read))


def _event(found: Any) -> Event | None:
    try:
        stage, kind, micro = found["stage"], found["kind"], found["micro_batch"]
        start, end = as_number(found["start"]) or 0.0, as_number(found["end"]) or 0.0
        fits = 0 <= stage < MOST_STAGES and 0 <= start <= end and kind in (*WORK, IDLE)
        return Event(int(stage), kind, int(micro), start, end) if fits else None
    except (TypeError, LookupError, ValueError, OverflowError):
        return None


MOST_LAYERS, MOST_EXPERTS = 128, 512  # of a picture; with more, cells are too small to see
CELL, LEAST_CELL = 26.0, 12.0  # pixels
FULL = 3.0  # times the mean load of its layer: the darkest cell


def load_picture(found: dict[str, Any], width: float) -> Picture | None:
    """`found` is the content of experts.json: a row per layer, a cell per expert, darker the more tokens it gets. None
    if it is not that, or if it is too large for a picture."""
    rows = as_counts(found.get("tokens"))
    if not any(map(any, rows)) or len(rows) > MOST_LAYERS or len(rows[0]) > MOST_EXPERTS:
        return None
    experts, names = len(rows[0]), [f"layer {place}" for place in range(1, len(rows) + 1)]
    left, top = letters(names[-1]) + 12, 22.0
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
