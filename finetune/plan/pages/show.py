"""A plan on a terminal: tables of memory, of a step's time and of the layouts, as wide as the terminal is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune.drawing.table import GAP, Table
from finetune.drawing.words import plain
from finetune.plan.pages.tables import (
    WHY,
    host_table,
    layout_table,
    memory_table_that_fits,
    slower_words,
    step_table,
    summary_table,
)
from finetune.plan.pages.words import headline, mend_words, more_words, peak_words, verdict

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
    table, left_out = memory_table_that_fits(plan, console.width)
    _print(console, table)
    if left_out:
        _print(console, summary_table(plan))
    for line in () if left_out else peak_words(plan):
        _say(console, f"  {line}")
    if host := host_table(plan):
        _print(console, host)
    _print(console, step_table(plan))
    for line in (*more_words(plan), *(f"note: {plain(note)}" for note in notes)):
        _say(console, f"  {line}")
    if found is not None:
        _show_layouts(console, plan, found)


def _show_layouts(console: Console, plan: Plan, found: Found) -> None:
    if found.fitting:
        table = layout_table(plan, found)
        shown = table.fitted(console.width)
        _print(console, shown)
        if WHY not in shown.columns:
            for line in slower_words(found):
                _say(console, f"  {line}")
        _say(console, f"  {found.seen:,} layouts were looked at.")
    if found.failing:
        _say(console, "\nThese do not fit, at the smallest batch that was looked at:", "bold")
        for one in found.failing:
            _say(console, f"  {one.words}: {one.why_not}")


def _print(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as Rich
    from rich.text import Text

    stroke = "\u2500" if console.is_terminal and not console.options.ascii_only else "-"
    rule, none = f" {stroke}{stroke} \n", "    \n"
    lines = box.Box(none * 2 + rule + none + rule * 2 + none * 2, ascii=stroke == "-")
    _say(console, f"\n{table.title}", "bold")
    shown = Rich(box=lines, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for index, name in enumerate(table.columns):
        is_text = index == 0 or name in table.texts
        shown.add_column(Text(name), justify="left" if is_text else "right", no_wrap=name != WHY, overflow="fold")
    for index, row in enumerate(table.rows):
        style = "bold" if table.total is not None and index >= table.total else None
        shown.add_row(*map(Text, row), style=style, end_section=table.total == index + 1)
    console.print(shown)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, emoji=False)
