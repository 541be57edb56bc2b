"""Pictures of a bench: throughput, memory by rank and by kind, planned against measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from finetune.drawing.shapes import (
    ACCENT,
    INK,
    LIMIT,
    MUTED,
    NORMAL,
    SMALL,
    Box,
    Dot,
    Line,
    Picture,
    Scale,
    Shape,
    Word,
    folded,
    letters,
    ticks_below,
    ticks_left,
)
from finetune.drawing.words import number, spelled, unit_for
from finetune.plan.pages.kinds import in_order
from finetune.plan.pages.memory_pictures import COLOURS, OTHER
from finetune.report.bench import PIPELINE, Bench, Cell
from finetune.report.curves import HEIGHT, WIDTH, colour_of, shortened
from finetune.report.rank_memory import shown_ranks

MOST_RANKS = 4  # of a cell, each with its bar


def throughput_bars(bench: Bench, model: str, width: float) -> Picture:
    """A bar a cell, with the range of its repeats; what failed says so."""
    cells = bench.of(model)
    rates = [rate for cell in cells for rate in cell.values("samples_per_second")]
    alt = "; ".join(f"{cell.name}: {_rate_words(bench, cell)}" for cell in cells)
    picture = Picture("throughput", f"Throughput: {model}", alt, width)
    left, above = _left(cells, width)
    scale = Scale(0, max(rates, default=0.0) or 1.0, left, width - 124)
    top = y = 2.0
    shapes: list[Shape] = []
    for cell in cells:
        y, place = _label(shapes, cell, y, left, above)
        if cell.rate is None:
            shapes.append(Word(left, place + 13, cell.status, colour=LIMIT, bold=True))
            continue
        x, values = scale(cell.rate), cell.values("samples_per_second")
        shapes.append(
            Box(left, place, max(x - left, 0.5), 17, ACCENT, f"{cell.name}: {_rate_words(bench, cell)}", 0.85)
        )
        end = scale(max(values))
        if len(values) > 1:
            middle = place + 8.5
            shapes.append(Line(((scale(min(values)), middle), (end, middle)), INK, 1.2))
            shapes += [
                Line(((scale(v), middle - 4), (scale(v), middle + 4)), INK, 1.2) for v in (min(values), max(values))
            ]
        shapes.append(Word(max(x, end) + 6, place + 13, _rate_words(bench, cell, short=True), bold=True))
    ticks_below(picture, scale, top, y, "samples a second, all ranks; lines: range of repeats")
    picture.add(*shapes)
    picture.height = y + 34
    return picture


def _rate_words(bench: Bench, cell: Cell, short: bool = False) -> str:
    if cell.rate is None:
        return cell.status
    share = bench.rate_to_ddp(cell)
    words = number(cell.rate) if short else f"{number(cell.rate)} samples/s"
    return words if share is None else f"{words}  {share:.2f}x" if short else f"{words}, {share:.2f} of DDP"


def _left(cells: Sequence[Cell], width: float) -> tuple[float, bool]:
    """Where bars begin, and whether their names stand above them."""
    longest = max(letters(cell_words(cell), NORMAL) for cell in cells) + 12
    return (longest, False) if longest < width * 0.35 else (4.0, True)


def _label(shapes: list[Shape], cell: Cell, y: float, left: float, above: bool) -> tuple[float, float]:
    """Where the next row begins, and this one's bar."""
    if not above:
        shapes.append(Word(left - 8, y + 13, cell_words(cell), "end", size=NORMAL))
        return y + 24, y
    shapes.append(Word(4, y + 12, cell_words(cell), size=NORMAL))
    return y + 42, y + 17


def cell_words(cell: Cell) -> str:
    """Its layout and what else sets it off from others of its model."""
    stages, interval = cell.count("pipeline_parallel_size", 1), cell.count("checkpoint_interval")
    of_stages = f", {stages} stage{'s' if stages > 1 else ''}" if stages > 1 or cell.layout == PIPELINE else ""
    words = cell.layout + of_stages + (", checkpointing" if interval and cell.layout != "checkpointing" else "")
    accumulation = f"x{cell.count('accumulation')}" if cell.count("accumulation", 1) > 1 else ""
    return shortened(f"{words}, {cell.count('world_size', 1)} x {cell.count('micro_batch', 1)}{accumulation}", 44)


def rank_memory(bench: Bench, model: str, width: float) -> Picture | None:
    """Peak and average of each rank; None where no cell has measured it."""
    cells = [cell for cell in bench.of(model) if cell.memory("peak_bytes")]
    if not cells:
        return None
    most = max(size for cell in cells for size in cell.memory("peak_bytes"))
    unit = unit_for(most)
    alt = "; ".join(
        f"{cell.name}: peak {', '.join(map(unit, cell.memory('peak_bytes')))} {unit.name}" for cell in cells
    )
    picture = Picture("rank-memory", f"Memory of each rank: {model}", alt, width)
    y = picture.legend([("average", ACCENT), ("peak", MUTED)], 0) + 4
    left, above = _left(cells, width)
    left += 44
    scale = Scale(0, most / unit.size or 1.0, left, width - 58)
    top, shapes = y, list[Shape]()
    for cell in cells:
        peaks, averages = cell.memory("peak_bytes"), cell.memory("average_bytes")
        if above:
            shapes.append(Word(4, y + 12, cell_words(cell), size=NORMAL))
            y += 17
        else:
            shapes.append(Word(left - 52, y + 12, cell_words(cell), "end", size=NORMAL))
        for rank in shown_ranks(peaks, MOST_RANKS):
            shapes.append(Word(left - 6, y + 11, f"rank {rank}", "end", MUTED, 10))
            end, says = scale(peaks[rank] / unit.size), f"{cell.name}, rank {rank}: peak {unit.said(peaks[rank])}"
            shapes.append(Box(left, y, max(end - left, 0.5), 14, MUTED, says, 0.45))
            if rank < len(averages):
                reach = max(scale(min(averages[rank], peaks[rank]) / unit.size) - left, 0.5)
                shapes.append(Box(left, y, reach, 14, ACCENT, f"average {unit.said(averages[rank])}", 0.85))
            shapes.append(Word(end + 5, y + 11, unit(peaks[rank]), bold=True))
            y += 18
        y += 6
    ticks_below(picture, scale, top, y, unit.words)
    picture.add(*shapes)
    picture.height = y + 34
    return picture


def kind_memory(bench: Bench, model: str, width: float) -> Picture | None:
    """Rank 0, by kind; None where no cell has measured it."""
    cells = [cell for cell in bench.of(model) if cell.by_kind]
    if not cells:
        return None
    kinds = in_order({kind for cell in cells for kind in cell.by_kind})
    most = max(sum(cell.by_kind.values()) for cell in cells)
    unit = unit_for(most)
    alt = "; ".join(f"{cell.name}: {unit.said(sum(cell.by_kind.values()))}" for cell in cells)
    picture = Picture("kind-memory", f"Memory of rank 0, by kind: {model}", alt, width)
    y = picture.legend([(spelled(kind), kind_colour(kind)) for kind in kinds], 0) + 6
    left, above = _left(cells, width)
    scale = Scale(0, most / unit.size, left, width - 58)
    top, shapes = y, list[Shape]()
    for cell in cells:
        y, place = _label(shapes, cell, y, left, above)
        below = 0
        for kind in kinds:
            if size := cell.by_kind.get(kind, 0):
                x, end = scale(below / unit.size), scale((below + size) / unit.size)
                says = f"{spelled(kind)}: {unit.said(size)}"
                shapes.append(Box(x, place, max(end - x - (end - x > 3), 0.4), 17, kind_colour(kind), says))
                below += size
        shapes.append(Word(scale(below / unit.size) + 5, place + 13, unit(below), bold=True))
    ticks_below(picture, scale, top, y, unit.words)
    picture.add(*shapes)
    picture.height = y + 34
    return picture


def kind_colour(kind: str) -> str:
    """That of the plan's pictures, for the kinds that are the same."""
    return COLOURS.get(kind.removesuffix(" and other"), OTHER)


def planned_against_measured(bench: Bench, what: str, title: str) -> Picture | None:
    """`what`: "step_seconds" or "peak_bytes". Dots on the line were planned right; None where nothing was planned."""
    pairs = ((cell, cell.planned(what), cell.measured(what)) for cell in bench.cells)
    found = [(cell, planned, measured) for cell, planned, measured in pairs if planned and measured]
    if not found:
        return None
    words = "seconds"
    if what == "peak_bytes":
        unit = unit_for(max(size for _, *both in found for size in both))
        words, found = unit.name, [(cell, one / unit.size, other / unit.size) for cell, one, other in found]
    ratios = [planned / measured for _, planned, measured in found]
    spread = f"median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    alt = f"Planned / measured: {spread}; cells: {len(found)}."
    picture = Picture(f"planned-{what}", title, alt, WIDTH)
    models = list(dict.fromkeys(cell.model for cell, _, _ in found))
    y = picture.legend([(shortened(model), colour_of(index)) for index, model in enumerate(models)], 0) + 14
    ends = [value for _, planned, measured in found for value in (planned, measured)]
    low, high = min(ends) / 1.5, max(ends) * 1.5
    across, up = Scale(low, high, 52, WIDTH - 12, is_log=True), Scale(low, high, y + HEIGHT * 1.3, y, is_log=True)
    ticks_left(picture, up, across, f"measured, {words}")
    ticks_below(picture, across, up.end, up.start, f"planned, {words}")
    picture.add(Line(((across(low), up(low)), (across(high), up(high))), MUTED, 1.2, dashed=True))
    for cell, planned, measured in found:
        says = f"{cell.name}: planned {number(planned)}, measured {number(measured)}, {planned / measured:.2f}x"
        picture.add(Dot(across(planned), up(measured), colour_of(models.index(cell.model)), says, 4.5))
    for index, line in enumerate(folded(alt, WIDTH, SMALL)):
        picture.add(Word(0, up.start + 48 + 15 * index, line, colour=MUTED))
    picture.height = up.start + 40 + 15 * len(folded(alt, WIDTH, SMALL))
    return picture
