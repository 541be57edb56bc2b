"""A plan's tables: memory, step time, layouts; and their output on a terminal, fitted to its width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from finetune.errors import plain
from finetune.plan.search import slower_by
from finetune.report.plan_words import (
    EP,
    SP,
    fills_host,
    fits_with,
    headline,
    in_order,
    moment_words,
    more_words,
    rank_kinds,
    verdict,
)
from finetune.report.table import Table, print_table, say
from finetune.report.text import GIB, gib, number, seconds_words, spelled

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.plan.memory import RankMemory
    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate, Found

AS_FAST = 1e-3  # plans are not more precise than this
LAYOUT, MICRO, ACCUMULATION, CHECKPOINTING, STAGES = "layout", "micro", "accum", "ckpt", "stages"
EVAL = "eval batch"
PEAK, OF_LIMIT, STEP, RATE, RELATIVE = "peak GiB", "of limit", "step s", "samples/s", "relative"
WHY = "why slower, per sample"


def show(console: Console, plan: Plan, found: Found | None = None, mends: Sequence[Candidate] = (),
         notes: Sequence[str] = ()) -> None:  # fmt: skip
    """Print everything. `mends`: candidates that would fit, if the plan does not."""
    say(console, verdict(plan), "bold green" if plan.fits else "bold red")
    for mend in mends:
        say(console, f"  {fits_with(mend)}")
    say(console, headline(plan))
    table, left_out = memory_table_that_fits(plan, console.width)
    print_table(console, table)
    if left_out:
        print_table(console, summary_table(plan))
    for name, rank in () if left_out else rank_kinds(plan):
        say(console, f"  The peak of {name} is in {moment_words(rank.peak)}.")
    if fills_host(plan):
        print_table(console, host_table(plan))
    print_table(console, step_table(plan))
    for line in (*more_words(plan), *(f"note: {plain(note)}" for note in notes)):
        say(console, f"  {line}")
    if found is not None:
        _show_layouts(console, plan, found)


def _show_layouts(console: Console, plan: Plan, found: Found) -> None:
    if found.fitting:
        table = layout_table(plan, found)
        shown = table.fitted(console.width)
        print_table(console, shown)
        if WHY not in shown.columns:
            for line in slower_words(found):
                say(console, f"  {line}")
        say(console, f"  {found.seen:,} layouts were considered.")
    if found.failing:
        say(console, "\nThese do not fit, at the smallest batch that was considered:", "bold")
        for one in found.failing:
            more = "" if one.plan.job.checkpoint_interval else ", without checkpointing"
            say(console, f"  {one.words}{more}: {one.plan.why_not}")


def memory_table(plan: Plan, kinds: Sequence[tuple[str, RankMemory]]) -> Table:
    """Two columns for each kind of rank: at rest (between steps), and at the peak."""
    columns = tuple(f"{name}\n{when}" for name, _ in kinds for when in ("at rest", "at peak"))
    held = [moment for _, rank in kinds for moment in (rank.resident, rank.peak.by_kind)]
    return _held_table("Memory of each kind of rank, in GiB (2**30 bytes)", columns, held, plan.limit_bytes)


def _held_table(title: str, columns: tuple[str, ...], held: Sequence[dict[str, int]], limit: int) -> Table:
    """A row for each kind of memory, then total, limit and headroom."""
    kept, sums = in_order({kind for one in held for kind, size in one.items() if size}), [sum(o.values()) for o in held]
    form = _form(max(sums))
    rows = [(spelled(kind), *(form(one.get(kind, 0)) for one in held)) for kind in kept]
    ends = {"total": sums, "limit": [limit] * len(held), "headroom": [limit - size for size in sums]}
    rows += [(name, *map(form, sizes)) for name, sizes in ends.items()]
    return Table(title, ("GiB", *columns), tuple(rows), total=len(kept))


def memory_table_that_fits(plan: Plan, width: int) -> tuple[Table, bool]:
    """The memory table; with too many stages for the terminal, only the fullest, first, last and others that fit."""
    kinds, fullest = rank_kinds(plan), plan.peak_bytes
    kept, left_out = list(kinds), False
    while (table := memory_table(plan, kept)).width > width and len(kept) > 1:
        middle = sorted(range(len(kept)), key=lambda i: (kept[i][1].peak.bytes == fullest, abs(i - len(kept) / 2)))
        del kept[middle[0]]
        left_out = True
    return table, left_out


def summary_table(plan: Plan) -> Table:
    form, limit = _form(plan.peak_bytes), plan.limit_bytes
    rows = tuple(
        (name, form(rank.resident_bytes), form(rank.peak.bytes), form(limit - rank.peak.bytes), form(rank.host_bytes),
         _shortly(moment_words(rank.peak))) for name, rank in rank_kinds(plan)
    )  # fmt: skip
    columns = ("", "at rest", "at peak", "headroom", "host", "the peak is in")
    return Table("All of them, in GiB", columns, rows, texts=columns[-1:], folding=columns[-1:])


def _shortly(moment: str) -> str:
    """With only the last two parts of a module's name, so that a row fits into 80 columns."""
    what, of, module = moment.rpartition(" of ")
    return what + of + ".".join(module.split(".")[-2:])


def host_table(plan: Plan) -> Table:
    """Host memory of the node that uses the most."""
    title = "Memory of a node's host, or of its disks for NVMe, in GiB"
    return _held_table(title, ("a node",), [plan.host], plan.host_limit_bytes)


def _form(most: float) -> Callable[[float], str]:
    """A formatter for all of a table's numbers: two decimals, or five if the largest is below 1 GiB."""
    places = 2 if most >= GIB else 5
    least = 10**-places

    def form(size: float) -> str:
        if not size:
            return "-"
        return f"<{least:.{places}f}" if 0 < size / GIB < least / 2 else f"{size / GIB:,.{places}f}"

    return form


def step_table(plan: Plan) -> Table:
    total = plan.seconds.total
    parts = [(name, seconds) for name, seconds in plan.seconds.parts.items() if seconds]
    rows = [(spelled(name), seconds_words(seconds), f"{seconds / total:.1%}") for name, seconds in parts]
    rows.append(("step", seconds_words(total), "100.0%"))
    return Table("Step time, by part", ("part", "time", "share"), tuple(rows), total=len(parts))


def layout_table(plan: Plan, found: Found) -> Table:
    """The layouts that fit, fastest first. Some columns are left out if all rows have the default."""
    best, rows = found.fitting[0], []
    for place, one in enumerate(found.fitting, 1):
        job, peak = one.plan.job, one.plan.peak_bytes
        rows.append((
            str(place), one.name, str(job.micro_batch), str(job.accumulation), str(job.eval_batch),
            "yes" if job.checkpoint_interval else "no",
            str(job.stages), str(job.sequence_parallel_size), str(job.expert_parallel_size),
            gib(peak), f"{peak / plan.limit_bytes:.0%}",
            number(job.global_batch / one.samples_per_second),
            number(one.samples_per_second), f"{one.samples_per_second / best.samples_per_second:.2f}x",
            _why(best, one),
        ))  # fmt: skip
    columns = ("#", LAYOUT, MICRO, ACCUMULATION, EVAL, CHECKPOINTING, STAGES, SP, EP, PEAK, OF_LIMIT,
               STEP, RATE, RELATIVE, WHY)  # fmt: skip
    title = f"Layouts that fit into {gib(plan.limit_bytes)} GiB per rank, fastest first"
    table = Table(title, columns, tuple(rows), expendable=(OF_LIMIT, WHY, STEP), texts=(LAYOUT, WHY), folding=(WHY,))
    asked = str(plan.job.eval_batch)
    return table.unusual({ACCUMULATION: "1", EVAL: asked, CHECKPOINTING: "no", STAGES: "1", SP: "1", EP: "1"})


def _why(best: Candidate, other: Candidate) -> str:
    if _is_as_fast(best, other):
        return "" if other is best else "as fast"
    if other.measured is not None:
        return "measured"
    part, seconds = slower_by(best, other)
    return f"+{seconds_words(seconds)} {spelled(part)}"


def slower_words(found: Found) -> list[str]:
    """For terminals without room for the WHY column: for each part, the layouts that lose the most by it."""
    places: dict[str, list[str]] = {}
    for place, one in enumerate(found.fitting[1:], 2):
        if not _is_as_fast(found.fitting[0], one):
            places.setdefault(slower_by(found.fitting[0], one)[0], []).append(str(place))
    return [f"slower than 1 by {spelled(part)}: {', '.join(those)}" for part, those in places.items()]


def _is_as_fast(best: Candidate, other: Candidate) -> bool:
    return other.samples_per_second >= best.samples_per_second * (1 - AS_FAST)
