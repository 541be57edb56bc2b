"""A plan as one HTML page, and its pictures as one PNG.

write_page(Path("plan.html"), plan(job, machine), found, scaling=curve, command="finetune plan ...")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.plan.seconds import pipeline_schedule
from finetune.report.page import Block, Report, Section, as_html, drawn, write
from finetune.report.plan_pictures import host_bars, lanes, memory_bars, memory_over_time, scaling_curve, throughput
from finetune.report.plan_tables import host_table, layout_table, memory_table, step_table
from finetune.report.plan_words import fills_host, headline, more_words, rank_kinds, verdict
from finetune.report.shapes import INK, LIMIT, WIDE, Word, folded
from finetune.report.table import Table
from finetune.report.text import gib, number, seconds_words, spelled

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.plan.search import Found

Scaling = Sequence[tuple[int, float, float]]  # ranks, samples per second, the same with ideal scaling


def write_page(path: Path, plan: Plan, found: Found | None = None, *, scaling: Scaling = (), notes: Sequence[str] = (),
               command: str = "") -> None:  # fmt: skip
    """Write the page. Raises RequestError if the file cannot be written."""
    summary = [
        Block("verdict" if plan.fits else "bad", verdict(plan)),
        Block("words", f"{seconds_words(plan.seconds.total)} per step. {' '.join(more_words(plan))}"),
    ]
    failing = []
    if found is not None and found.failing:
        rows = tuple((one.words, one.plan.why_not or "") for one in found.failing)
        title, columns = "At the smallest batch that was considered", ("layout", "why not")
        failing.append(Block("table", Table(title, columns, rows, texts=columns, folding=columns[1:])))
    sections = [
        Section("The plan", tuple(summary)),
        Section("Notes", tuple(Block("words", note) for note in notes)),
        *pictured(plan, found, scaling),
        Section("Layouts that do not fit", tuple(failing)),
        Section("Step time", (Block("table", step_table(plan)),)),
        Section("How it is computed", (Block("formulas", None),)),
        Section(f"The machine's profile: {plan.machine.name}", (Block("facts", _profile(plan)),)),
    ]
    write(path, as_html(Report(headline(plan), tuple(one for one in sections if one.blocks), command)))


def write_png(path: Path, plan: Plan, found: Found | None = None, *, scaling: Scaling = ()) -> None:
    """Write the page's pictures, one below the other. Raises RequestError if the file cannot be written."""
    from finetune.report.png import write_png as write_pictures  # Pillow takes a moment to import

    said = folded(headline(plan), WIDE, 13, indent="")
    words = [Word(0, 26 + 18 * index, line, size=13) for index, line in enumerate(said)]
    words.append(Word(0, 32 + 18 * len(said), verdict(plan), size=13, colour=INK if plan.fits else LIMIT, bold=True))
    drawings = [block.value[0] for section in pictured(plan, found, scaling) for block in section.blocks
                if block.kind == "drawn"]  # fmt: skip
    write_pictures(path, drawings, words)


def pictured(plan: Plan, found: Found | None, scaling: Scaling) -> list[Section]:
    """A section for each picture that there is something to draw for, with its numbers below."""
    peaks = tuple((name, phase, gib(moment.bytes), moment.where)
                  for name, rank in rank_kinds(plan) for phase, moment in rank.peaks.items())  # fmt: skip
    highest = Table("The peak of each phase, in GiB", ("ranks", "phase", "GiB", "at"), peaks, texts=("phase", "at"))
    tables = [Block("table", memory_table(plan, rank_kinds(plan))), Block("table", highest)]
    shown = [[*drawn(memory_bars, plan, "Memory of the device, by kind", caption=True), *tables]]
    if fills_host(plan):
        shown.append([*drawn(host_bars, plan, caption=True), Block("table", host_table(plan))])
    if plan.fullest.timeline:
        shown.append(drawn(memory_over_time, plan, caption=True))
    schedule = pipeline_schedule(plan.job, plan.machine) if plan.job.stages > 1 else None
    if schedule is not None and schedule.events:
        shown.append(drawn(lanes, schedule, "The pipeline's schedule", caption=True))
    if found is not None and found.fitting:
        seen = Block("muted", f"{found.seen:,} layouts were considered.")
        shown.append([*drawn(throughput, found, plan), Block("table", layout_table(plan, found)), seen])
    if len(scaling) > 1:
        rows = tuple((f"{n:,}", number(rate), number(ideal), f"{rate / ideal:.1%}") for n, rate, ideal in scaling)
        table = Table("Samples per second over all ranks", ("ranks", "planned", "ideal", "share"), rows)
        shown.append([*drawn(scaling_curve, scaling, caption=True), Block("table", table)])
    return [Section(blocks[0].value[0].title, tuple(blocks)) for blocks in shown]


def _profile(plan: Plan) -> list[tuple[str, str]]:
    """The sources of the machine's numbers, from its profile."""
    machine = plan.machine
    values = {
        "memory_bytes": f"{gib(machine.memory_bytes)} GiB; ",
        "context_bytes": f"{gib(machine.context_bytes)} GiB; ",
        "fragmentation": f"{machine.fragmentation:.1%}; ",
        "memory_bandwidth": f"{machine.memory_bandwidth / 1e9:,.0f} GB/s; ",
    }
    return [(spelled(name), values.get(name, "") + source) for name, source in machine.sources.items()]
