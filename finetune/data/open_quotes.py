"""Detects unclosed double quotes in a CSV, which merge the rows up to the next quote. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from finetune.data.charset import UTF8
from finetune.errors import RequestError


def refuse_open_quotes(said: str, path: Path, separator: str, columns: int) -> None:
    """Raises RequestError for a multi-line row that contains a line complete in itself and a quote that closes in the
    middle of a cell: it is the opening quote of a later row. The quote of a real multi-line cell closes before a
    separator or line end."""
    lines: list[str] = []  # of the current row
    start = 1
    with path.open(encoding=UTF8, newline="", errors="replace") as file:
        reader = csv.reader(_seen(file, lines), delimiter=separator)
        try:
            for _ in reader:
                if any(line.count(separator) >= columns - 1 for line in lines[:-1]) and _is_broken(lines, separator):
                    raise RequestError(
                        f"{said}: line {start} opens a double quote that its row does not close, so "
                        f"lines {start} to {start + len(lines) - 1} would be one row. Close it, or double it if meant."
                    )
                start += len(lines)
                lines.clear()
        except csv.Error:  # the table reader reports it
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
