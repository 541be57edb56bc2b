"""A plan on a terminal: tables of memory, of a step's time and of the layouts, as wide as the terminal is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune.errors import plain
from finetune.report import plan_tables as tables
from finetune.report.plan_words import fills_host, headline, mend_words, more_words, peak_words, verdict
from finetune.report.table import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate, Found


def show(plan: Plan, found: Found | None = None, mends: Sequence[Candidate] = (), notes: Sequence[str] = (),
         console: Console | None = None) -> None:  # fmt: skip
    """Print it all. `mends`: what would make a plan fit that does not."""
    from rich.console import Console

    console = console or Console()
    _say(console, headline(plan), "bold")
    _say(console, verdict(plan), "green" if plan.fits else "bold red")
    for mend in mends:
        _say(console, f"  fits with {mend_words(mend)}")
    table, left_out = tables.memory_table_that_fits(plan, console.width)
    print_table(console, table)
    if left_out:
        print_table(console, tables.summary_table(plan))
    for line in () if left_out else peak_words(plan):
        _say(console, f"  {line}")
    if fills_host(plan):
        print_table(console, tables.host_table(plan))
    print_table(console, tables.step_table(plan))
    for line in (*more_words(plan), *(f"note: {plain(note)}" for note in notes)):
        _say(console, f"  {line}")
    if found is not None:
        _show_layouts(console, plan, found)


def _show_layouts(console: Console, plan: Plan, found: Found) -> None:
    if found.fitting:
        table = tables.layout_table(plan, found)
        shown = table.fitted(console.width)
        print_table(console, shown)
        if tables.WHY not in shown.columns:
            for line in tables.slower_words(found):
                _say(console, f"  {line}")
        _say(console, f"  {found.seen:,} layouts were looked at.")
    if found.failing:
        _say(console, "\nThese do not fit, at the smallest batch that was looked at:", "bold")
        for one in found.failing:
            _say(console, f"  {one.words}: {one.why_not}")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, emoji=False)
