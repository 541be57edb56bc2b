"""Charts of a benchmark: throughput, memory by rank and by kind, planned against measured."""

from __future__ import annotations

import statistics

from finetune.report.bench import PIPELINE, Bench, Cell
from finetune.report.charts import Bar, bars
from finetune.report.curves import HEIGHT, WIDTH
from finetune.report.plan_pictures import by_kind, kind_legend
from finetune.report.run_pictures import shown_ranks
from finetune.report.shapes import ACCENT, MUTED, Dot, Line, Picture, Scale, colour_of
from finetune.report.text import number, shortened, unit_for

MOST_RANKS = 4  # shown per cell, each with its bar


def throughput_bars(bench: Bench, model: str, width: float) -> Picture:
    """A bar per cell, with the range of its repeats; failed cells show their status."""
    cells, rows = bench.of(model), []
    for cell in cells:
        part = [] if cell.rate is None else [(cell.rate, ACCENT, f"{cell.name}: {_rate_words(bench, cell)}")]
        ends = cell.values("samples_per_second")
        rows.append(Bar(cell_words(cell), part, _rate_words(bench, cell, short=True), ends=ends))
    alt = "; ".join(f"{cell.name}: {_rate_words(bench, cell)}" for cell in cells)
    words = "samples/s, all ranks; lines: range of repeats"
    return bars(Picture(f"Throughput: {model}", alt, width), rows, words)


def _rate_words(bench: Bench, cell: Cell, short: bool = False) -> str:
    if cell.rate is None:
        return cell.status
    share = bench.rate_to_ddp(cell)
    words = number(cell.rate) if short else f"{number(cell.rate)} samples/s"
    return words if share is None else f"{words}  {share:.2f}x" if short else f"{words}, {share:.2f} of DDP"


def cell_words(cell: Cell) -> str:
    """Its layout, and what else distinguishes it from other cells of its model."""
    stages, interval = cell.count("pipeline_parallel_size", 1), cell.count("checkpoint_interval")
    of_stages = f", {stages} stage{'s' if stages > 1 else ''}" if stages > 1 or cell.layout == PIPELINE else ""
    words = cell.layout + of_stages + (", checkpointing" if interval and cell.layout != "checkpointing" else "")
    accumulation = f"x{cell.count('accumulation')}" if cell.count("accumulation", 1) > 1 else ""
    return shortened(f"{words}, {cell.count('world_size', 1)} x {cell.count('micro_batch', 1)}{accumulation}", 44)


def rank_memory(bench: Bench, model: str, width: float) -> Picture | None:
    """Peak and average of each rank; None if no cell measured it."""
    cells = [cell for cell in bench.of(model) if cell.memory("peak_bytes")]
    if not cells:
        return None
    unit, rows = unit_for(max(size for cell in cells for size in cell.memory("peak_bytes"))), []
    for cell in cells:
        peaks, averages = cell.memory("peak_bytes"), cell.memory("average_bytes")
        for rank in shown_ranks(peaks, MOST_RANKS):
            average = min(averages[rank], peaks[rank]) if rank < len(averages) else 0.0
            says = f"{cell.name}, rank {rank}: peak {unit.said(peaks[rank])}, average {unit.said(average)}"
            parts = [(average / unit.size, ACCENT, says), ((peaks[rank] - average) / unit.size, MUTED, says)]
            parts = [part for part in parts if part[0] or not peaks[rank]]
            rows.append(Bar(f"rank {rank}", parts, unit(peaks[rank]), cell_words(cell)))
    alt = "; ".join(
        f"{cell.name}: peak {', '.join(map(unit, cell.memory('peak_bytes')))} {unit.name}" for cell in cells
    )
    picture = Picture(f"Memory of each rank: {model}", alt, width)
    return bars(picture, rows, unit.words, [("average", ACCENT), ("peak", MUTED)])


def kind_memory(bench: Bench, model: str, width: float) -> Picture | None:
    """Rank 0, by kind; None if no cell measured it."""
    cells = [cell for cell in bench.of(model) if cell.by_kind]
    if not cells:
        return None
    unit = unit_for(max(sum(cell.by_kind.values()) for cell in cells))
    alt = "; ".join(f"{cell.name}: {unit.said(sum(cell.by_kind.values()))}" for cell in cells)
    picture = Picture(f"Memory of rank 0, by kind: {model}", alt, width)
    rows = [by_kind(cell_words(cell), cell.by_kind, unit) for cell in cells]
    return bars(picture, rows, unit.words, kind_legend([cell.by_kind for cell in cells]))


def planned_against_measured(bench: Bench, what: str, title: str) -> Picture | None:
    """`what`: "step_seconds" or "peak_bytes". Dots on the line were planned exactly; None if nothing was planned."""
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
    picture = Picture(title, alt, WIDTH)
    models = list(dict.fromkeys(cell.model for cell, _, _ in found))
    y = picture.legend([(shortened(model), colour_of(index)) for index, model in enumerate(models)], 0) + 14
    ends = [value for _, planned, measured in found for value in (planned, measured)]
    low, high = min(ends) / 1.5, max(ends) * 1.5
    across, up = Scale(low, high, 52, WIDTH - 12, is_log=True), Scale(low, high, y + HEIGHT * 1.3, y, is_log=True)
    picture.ticks_left(up, across, f"measured, {words}")
    picture.ticks_below(across, up.end, up.start, f"planned, {words}")
    picture.add(Line(((across(low), up(low)), (across(high), up(high))), MUTED, 1.2, dashed=True))
    for cell, planned, measured in found:
        says = f"{cell.name}: planned {number(planned)}, measured {number(measured)}, {planned / measured:.2f}x"
        picture.add(Dot(across(planned), up(measured), colour_of(models.index(cell.model)), says, 4.5))
    picture.height = picture.paragraph(alt, up.start + 48, MUTED) - 8
    return picture
