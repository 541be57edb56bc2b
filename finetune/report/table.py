"""A table of texts, for terminals, pages and Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.report.text import cell

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2  # characters between columns


@dataclass(frozen=True)
class Table:
    """If space is short, columns are dropped in the order of `expendable`. The first column is text, the rest are
    numbers, except `texts`; cells in `folding` columns may take several lines. Rows from `total` on are totals."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    expendable: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    folding: tuple[str, ...] = ()
    total: int | None = None

    @property
    def width(self) -> int:
        heads = (name.split("\n") for name in self.columns)
        cells = zip(heads, zip(*self.rows, strict=True), strict=True)
        return sum(max(map(len, (*head, *column))) + GAP for head, column in cells)

    def without(self, names: Iterable[str]) -> Table:
        gone = set(names)
        kept = [index for index, name in enumerate(self.columns) if name not in gone]
        rows = tuple(tuple(row[index] for index in kept) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[index] for index in kept), rows=rows)

    def unusual(self, usual: Mapping[str, str]) -> Table:
        """Without the columns that have their usual value in every row."""
        said = dict(zip(self.columns, map(set, zip(*self.rows, strict=True)), strict=True))
        return self.without(name for name, value in usual.items() if said[name] == {value})

    def fitted(self, width: int) -> Table:
        gone: list[str] = []
        while self.without(gone).width > width and len(gone) < len(self.expendable):
            gone.append(self.expendable[len(gone)])
        return self.without(gone)

    def is_text(self, index: int) -> bool:
        return not index or self.columns[index] in self.texts

    @property
    def plain(self) -> str:
        lines = (self.columns, *self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in lines)

    @property
    def markdown(self) -> str:
        """Aligned as on the page: texts to the left, numbers to the right."""
        rows = ["| " + " | ".join(map(cell, row)) + " |" for row in (self.columns, *self.rows)]
        rules = ("---" if self.is_text(index) else "---:" for index in range(len(self.columns)))
        return "\n".join((rows[0], f"|{'|'.join(rules)}|", *rows[1:]))


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is, without markup."""
    console.print(text, style=style, markup=False, highlight=False, emoji=False)


def print_table(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as Rich
    from rich.text import Text

    stroke = "\u2500" if console.is_terminal and not console.options.ascii_only else "-"
    rule, none = f" {stroke}{stroke} \n", "    \n"
    lines = box.Box(none * 2 + rule + none + rule * 2 + none * 2, ascii=stroke == "-")
    if table.title:
        say(console, f"\n{table.title}", "bold")
    shown = Rich(box=lines, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for index, name in enumerate(table.columns):
        folds, is_text = name in table.folding, table.is_text(index)
        shown.add_column(Text(name), justify="left" if is_text else "right", no_wrap=not folds, overflow="fold")
    for index, row in enumerate(table.rows):
        style = "bold" if table.total is not None and index >= table.total else None
        shown.add_row(*map(Text, row), style=style, end_section=table.total == index + 1)
    console.print(shown)
