"""The colors of pages and pictures."""

from __future__ import annotations

INK, MUTED, GRID, LIMIT, ACCENT = "ink", "muted", "grid", "limit", "accent"
# For light and dark mode: the page's own colors; s1 to s8 are for things that are compared.
NAMES = ("ink", "muted", "grid", "ground", "limit", "accent", *(f"s{index}" for index in range(1, 9)))
DAY = dict(zip(NAMES, "#1c2127 #5c6670 #dfe3e8 #ffffff #c2185b #0057b7 #0057b7 #d9730d #00844a #8e44ad #c2185b #0097a7 "
               "#8d6e3f #5c6670".split(), strict=True))  # fmt: skip
NIGHT = dict(zip(NAMES, "#e8ebee #a3adb8 #343b44 #15191e #ff6f9c #6cb6ff #6cb6ff #ffa657 #4fc98a #cf9dff #ff6f9c "
                 "#4dd0e1 #d0ad7b #a3adb8".split(), strict=True))  # fmt: skip


def colour_of(index: int) -> str:
    """The color of the `index`-th thing that is compared."""
    return f"s{index % 8 + 1}"


def variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
