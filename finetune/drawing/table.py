"""A table of texts, for a terminal and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

GAP = 2  # columns between two


@dataclass(frozen=True)
class Table:
    """Texts. Where there is little room, columns go in the order of `expendable`; the first is text, the rest are
    numbers, but for `texts`; those in `folding` may take several lines. `total`: the rows from this one on sum up those
    before."""

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
        kept = [index for index, name in enumerate(self.columns) if name not in set(names)]
        rows = tuple(tuple(row[index] for index in kept) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[index] for index in kept), rows=rows)

    def fitted(self, width: int) -> Table:
        gone: list[str] = []
        while self.without(gone).width > width and len(gone) < len(self.expendable):
            gone.append(self.expendable[len(gone)])
        return self.without(gone)
