"""Format untrusted text, numbers and units for terminals, pages, pictures and Markdown."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from finetune.errors import plain

MIB, GIB = 2**20, 2**30
LARGEST, SMALLEST = 1e100, 1e-100  # numbers that are drawn, and told from 0
LONGEST = 160  # letters in a table's cell
LONG_NAME = 34


@dataclass(frozen=True)
class Unit:
    """A unit of bytes, the same for a whole table column or picture."""

    name: str
    size: int

    def __call__(self, size: float | None) -> str:
        """The number without the unit; "" for None."""
        if size is None:
            return ""
        value = size / self.size
        return f"{value:,.2f}" if abs(value) >= 0.1 or not size else f"{value:,.4f}"

    def said(self, size: float) -> str:
        return f"{self(size)} {self.name}"

    @property
    def words(self) -> str:
        return f"{self.name} (2**{self.size.bit_length() - 1} bytes)"


gib = Unit("GiB", GIB)  # precise to a few MiB, for small sizes to a few KiB


def unit_for(most: float | None) -> Unit:
    """GiB, or MiB if the largest size is below 0.1 GiB."""
    return Unit("MiB", MIB) if most and most < GIB / 10 else gib


def spelled(kind: str) -> str:
    return kind.replace("_", " ")


def rounded(value: float) -> float:
    """To four significant digits, so that the rounded number decides on its form or unit: 0.99999 ms is 1 ms."""
    return float(f"{value:.4g}")


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(rounded(value)) >= 1000 else f"{value:.4g}"


def fixed(value: float | None, form: str = ".2f", unit: float = 1.0) -> str:
    """A number in the format `form`; "" for None."""
    return "" if value is None else format(value / unit, form)


def ratio(value: float | None, of: float | None) -> str:
    return f"{value / of:.2f}x" if value is not None and of else ""


def count_words(value: int) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if rounded(value) >= size:
            return f"{number(value / size)} {word}"
    return f"{value:,}"


def seconds_words(seconds: float) -> str:
    """In the unit that leaves one to three digits before the point."""
    near = rounded(seconds)
    size, unit = (1.0, "s") if near >= 1 or not seconds else (1e-3, "ms") if near >= 1e-3 else (1e-6, "us")
    return f"{number(seconds / size)} {unit}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def as_number(value: Any) -> float | None:
    """A number that can be drawn; None for anything else, including one that is not finite, or that may be too large
    for a float once it is multiplied. One that may be too small for that is 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:
        return None
    return float(value) if abs(value) >= SMALLEST else 0.0


def as_list(value: Any) -> list[Any]:
    """The list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """The dict, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_counts(found: Any) -> list[list[int]]:
    """The table of counts, whose rows have one length; an empty one for anything else."""
    rows = [as_list(row) for row in as_list(found)]
    each = [[as_number(count) for count in row] for row in rows]
    if not all(rows) or len(set(map(len, rows))) != 1 or any(n is None or n < 0 for row in each for n in row):
        return []
    return [[int(count or 0) for count in row] for row in each]


def said(value: Any) -> str:
    """A value from any file as a short cell text; "" for None."""
    if value is None:
        return ""
    found = as_number(value)
    if found is not None:
        return f"{value:,}" if isinstance(value, int) else number(found)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def shortened(name: str, most: int = LONG_NAME) -> str:
    """Shortened in the middle, since names of runs often differ at the end."""
    return name if len(name) <= most else f"{name[: most // 3]}…{name[len(name) - (most - most // 3 - 1) :]}"


def fenced(text: str) -> str:
    """A Markdown block that shows `text` verbatim, whatever fences it contains."""
    text = "\n".join(map(plain, text.split("\n")))
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def cell(text: Any) -> str:
    """One line that neither ends a table cell nor starts markup, and has no terminal control characters."""
    line = plain(" ".join(str(text).split()), "")
    return re.sub(r"([\\|<>`*_\[\]#!])", r"\\\1", line)
