"""The sections of a report on a benchmark."""

from __future__ import annotations

from finetune.report.bench import DONE, Bench, Cell, numbers, paired
from finetune.report.bench_pictures import (
    cell_words,
    kind_memory,
    planned_against_measured,
    rank_memory,
    throughput_bars,
)
from finetune.report.curves import STEP, Curve, Panel
from finetune.report.page import Block, Curves, Section, drawn
from finetune.report.published import AVERAGE_MEMORY, Published, ratios, study
from finetune.report.shapes import Point, colour_of
from finetune.report.table import Table
from finetune.report.text import as_number, fixed, number, ratio, said, spelled, unit_for

FIGURES = (
    "Values are medians over the repeats; the spread is half of their range. x DDP: throughput relative to DDP with "
    "the same model, ranks, samples per step and precision, each repeat relative to the same repeat."
)
MEMORY = {"peak_bytes": "peak", "average_bytes": "average", "rss_peak_bytes": "resident"}


def bench_sections(bench: Bench, *, named: bool = False) -> list[Section]:
    """`named`: put the benchmark's name into each title, if there are several."""
    sections = {
        "Summary": _summary, "Throughput": _throughput, "Memory": _memory, "Planned against measured": _planned,
        "Loss": _losses, "Published figures beside ours": _published, "Failures": _failures,
        "Machine, versions and grid": _made,
    }  # fmt: skip
    of = f" of {bench.name}" if named else ""
    return [Section(title + of, tuple(blocks)) for title, made in sections.items() if (blocks := made(bench))]


def _summary(bench: Bench) -> list[Block]:
    rest = [cell for cell in bench.cells if not cell.done]
    done = len(bench.cells) - len(rest)
    words = f"{done} of {len(bench.cells)} cells were measured"
    words += f"; {', '.join(f'{cell.name} ({cell.status})' for cell in rest[:6])} failed." if rest else "."
    blocks = [Block("verdict" if done else "bad", words), *(Block("muted", note) for note in bench.notes)]
    if bench.cells:
        blocks += [Block("table", _summary_table(bench)), Block("muted", FIGURES)]
    return blocks


def _summary_table(bench: Bench) -> Table:
    memory = {key: unit_for(max((cell.most(key) or 0 for cell in bench.cells), default=0)) for key in MEMORY}
    held = (f"{words} {memory[key].name}" for key, words in MEMORY.items())
    columns = ("cell", "status", "x DDP", "samples/s", "spread", "tokens/s", *held, "final loss", "model", "layout",
               "ranks", "micro-batch")  # fmt: skip
    rows = []
    for cell in bench.cells:
        rows.append((
            cell.name, cell.status, fixed(bench.rate_to_ddp(cell)), number(cell.rate),
            fixed(cell.spread, ".1%"), number(cell.median("tokens_per_second")),
            *(unit(cell.most(key)) for key, unit in memory.items()),
            number(cell.final_loss), cell.model, cell.layout, cell.word("world_size"), cell.word("micro_batch"),
        ))  # fmt: skip
    table = Table("All cells", columns, tuple(rows), texts=("model", "layout", "status"))
    return table.unusual(dict.fromkeys(columns, ""))


def _throughput(bench: Bench) -> list[Block]:
    return [block for model in bench.models for block in drawn(throughput_bars, bench, model)]


def _memory(bench: Bench) -> list[Block]:
    by = bench.measured_by
    blocks = [Block("muted", f"Peak and average: {' and '.join(by)}.")] if by else []
    for model in bench.models:
        blocks += [*drawn(rank_memory, bench, model), *drawn(kind_memory, bench, model)]
    return blocks


def _planned(bench: Bench) -> list[Block]:
    titles = {"step_seconds": "Step time", "peak_bytes": "Peak memory of a rank"}
    drawn = (planned_against_measured(bench, what, title) for what, title in titles.items())
    pictures = tuple(picture for picture in drawn if picture is not None)
    if not pictures:
        return []
    peaks = (cell.planned("peak_bytes") or cell.most("peak_bytes") for cell in bench.cells)
    unit = unit_for(max((peak for peak in peaks if peak), default=0))
    rows = tuple(
        (cell.name, number(cell.planned("step_seconds")), number(cell.step_seconds),
         ratio(cell.planned("step_seconds"), cell.step_seconds), unit(cell.planned("peak_bytes")),
         unit(cell.most("peak_bytes")), ratio(cell.planned("peak_bytes"), cell.most("peak_bytes")),
         unit(cell.most("average_bytes")))
        for cell in bench.cells if cell.planned("step_seconds") or cell.planned("peak_bytes")
    )  # fmt: skip
    columns = ("cell", "step s\nplanned", "step s\nmeasured", "planned /\nmeasured", f"peak {unit.name}\nplanned",
               f"peak {unit.name}\nmeasured", "planned / \nmeasured", f"average {unit.name}\nmeasured")  # fmt: skip
    return [Block("panels", pictures), Block("table", Table("Planned against measured", columns, rows))]


def _losses(bench: Bench) -> list[Block]:
    """A panel for each group of cells whose losses should agree: one model and one number of samples per step."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in bench.cells:
        if any(len(numbers(row.get("losses"))) > 1 for row in cell.done):
            groups.setdefault((cell.model, cell.global_batch), []).append(cell)
    if not groups:
        return []
    layouts = list(dict.fromkeys(cell.layout for cells in groups.values() for cell in cells))
    panels = []
    for (model, batch), cells in groups.items():
        curves = tuple(Curve(cell_words(cell), colour_of(layouts.index(cell.layout)), {STEP: _points(cell)})
                       for cell in cells)  # fmt: skip
        panels.append(Panel(f"{model}, {batch:,} samples per step", curves))
    key = tuple((layout, colour_of(index)) for index, layout in enumerate(layouts))
    below = Block("muted", "The curves of layouts that compute the same coincide.")
    return [Block("curves", Curves(tuple(panels), (STEP,), key)), below]


def _points(cell: Cell) -> list[Point]:
    losses = next(row["losses"] for row in cell.done if len(numbers(row.get("losses"))) > 1)
    return [(float(step), loss) for step, one in enumerate(losses, 1) if (loss := as_number(one)) is not None]


def _published(bench: Bench) -> list[Block]:
    known = study()
    rows = [_beside(bench, one) for one in ratios(known["figures"]) if one.model in bench.models]
    if not rows:
        return []
    columns = ("model", "layout", "figure", "published", "ours", "ours / published")
    title = "Ratios to DDP of the same model, or of more stages to fewer"
    table = Table(title, columns, tuple(rows), texts=("layout", "figure"))
    source = f"Published: {known['title']}, on {known['machine']} ({known['source']}). "
    dates = sorted(day[:10] for day in bench.facts("started"))
    when = "" if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    ours = f"Ours: {' | '.join(bench.facts('machine'))}; {when}. {known['note']}"
    return [Block("table", table), Block("muted", source + ours)]


def _beside(bench: Bench, one: Published) -> tuple[str, ...]:
    """A published ratio, with ours for the same model, layout and stages if there is such a cell."""

    def cells_of(stages: int) -> list[Cell]:
        return [cell for cell in bench.of(one.model) if cell.layout == one.layout
                and cell.count("pipeline_parallel_size", 1) == stages]  # fmt: skip

    if one.by_stages is not None:
        pairs = ((cell, base) for cell in cells_of(one.stages) for base in cells_of(one.by_stages))
        found = (paired(cell.rates, base.rates) for cell, base in pairs if cell.setting == base.setting)
    else:
        compare = bench.memory_to_ddp if one.figure == AVERAGE_MEMORY else bench.rate_to_ddp
        found = (compare(cell) for cell in cells_of(one.stages))
    ours = next((value for value in found if value is not None), None)
    layout = f"{one.layout}, {one.stages} stages" if one.stages != 1 else one.layout
    figure = one.figure if one.by_stages is None else f"{one.figure}, relative to {one.by_stages} stages"
    return one.model, layout, figure, fixed(one.ratio), fixed(ours), ratio(ours, one.ratio)


def _failures(bench: Bench) -> list[Block]:
    rows = tuple(
        (cell.name, said(row.get("repeat")), said(row.get("status")), said(row.get("reason")), said(row.get("log")))
        for cell in bench.cells for row in cell.rows if row.get("status") != DONE
    )  # fmt: skip
    columns = ("cell", "repeat", "status", "reason", "log")
    table = Table("Not measured, and why", columns, rows, texts=columns[2:], folding=("reason",))
    return [Block("table", table)] if rows else []


def _made(bench: Bench) -> list[Block]:
    """How the benchmark was made. `started` is when the first repeat started."""
    facts = [(spelled(key), " | ".join(found)) for key in ("machine", "versions", "git_revision")
             if (found := bench.facts(key))]  # fmt: skip
    if scales := bench.facts("scale") or ([bench.scale] if bench.scale else []):
        facts.append(("scale of the models", " | ".join(scales)))
    if starts := sorted(bench.facts("started")):
        facts.insert(0, ("started", starts[0]))
    blocks = [Block("facts", facts)] if facts else []
    return blocks + [Block("folded", [Block("code", text)], name) for name, text in bench.grids.items()]
