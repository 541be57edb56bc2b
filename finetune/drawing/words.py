"""Units and plain lines, for terminals, pages and pictures."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Unit:
    """Of bytes, the same for all of a table's column or of a picture."""

    name: str
    size: int

    def __call__(self, size: float) -> str:
        """The number alone."""
        value = size / self.size
        return f"{value:,.2f}" if abs(value) >= 0.1 or not size else f"{value:,.4f}"

    def said(self, size: float) -> str:
        return f"{self(size)} {self.name}"

    @property
    def words(self) -> str:
        """For an axis."""
        return f"{self.name} (2**{self.size.bit_length() - 1} bytes)"


def unit_for(most: float | None) -> Unit:
    """GiB, or MiB where the most is below a tenth of one GiB."""
    return Unit("MiB", MIB) if most and most < GIB / 10 else Unit("GiB", GIB)


def spelled(kind: str) -> str:
    return kind.replace("_", " ")


def gib(size: float) -> str:
    """In GiB, 2**30 bytes; to a few MiB, or where all is small to a few KiB."""
    return Unit("GiB", GIB)(size)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def count_words(value: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.4g} {word}"
    return f"{value:,}"


def seconds_words(seconds: float) -> str:
    """In the unit that leaves one to three figures before the point."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:,.4g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"


def plain(text: str) -> str:
    """In one line, without what would move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)
