"""A double quote of a csv that is not closed: the rows up to the next quote become one cell. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from finetune.data.charset import UTF8
from finetune.errors import RequestError


def refuse_open_quotes(said: str, path: Path, separator: str, columns: int) -> None:
    """Raises RequestError for a row of several lines, one of which looks whole by itself, in which a quote closes in
    the middle of a cell: the next row's opening quote has closed it. A cell that means to hold lines is closed by a
    separator or a line's end."""
    lines: list[str] = []  # of the row that is being read
    start = 1
    with path.open(encoding=UTF8, newline="", errors="replace") as file:
        reader = csv.reader(_seen(file, lines), delimiter=separator)
        try:
            for _ in reader:
                if any(line.count(separator) >= columns - 1 for line in lines[:-1]) and _is_broken(lines, separator):
                    raise RequestError(
                        f"{said}: line {start} opens a double quote that its row does not close, so that the rows of "
                        f"lines {start} to {start + len(lines) - 1} would be one. Close it, or double it if meant."
                    )
                start += len(lines)
                lines.clear()
        except csv.Error:  # which the reader of the table explains
            return


def _seen(file: Iterable[str], lines: list[str]) -> Iterator[str]:
    for line in file:
        lines.append(line)
        yield line


def _is_broken(lines: list[str], separator: str) -> bool:
    try:
        list(csv.reader(lines, delimiter=separator, strict=True))
    except csv.Error:
        return True
    return False
