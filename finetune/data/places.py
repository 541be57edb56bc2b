"""Locates a row of data for error messages: its file, and its line or row there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.data.files import KINDS

NUMBER = "__row__"  # our own column: the row's number in its file, from 0


@dataclass(frozen=True)
class Place:
    """`lines` is the file's path if it has one row per line."""

    name: str
    lines: str | None = None

    @classmethod
    def of_file(cls, name: str) -> Place:
        path = Path(name).expanduser()
        return cls(path.name, str(path) if KINDS.get(path.suffix.lower()) == "json" else None)

    def of(self, row: int | None) -> str:
        """The place in words; just the file if the row's number is unknown."""
        if row is None:
            return self.name
        line = None if self.lines is None else _line_of(self.lines, row)
        return f"{self.name} line {line}" if line is not None else f"{self.name} row {row + 1}"


def _line_of(path: str, row: int) -> int | None:
    """The line of a row; blank lines are not rows. None for a file that is one JSON list, or in UTF-16."""
    with open(path, "rb") as file:
        rows = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for count, (number, line) in enumerate(rows):
            if count == 0 and (line.lstrip().startswith(b"[") or b"\0" in line):
                return None
            if count == row:
                return number
    return None
