"""What a check reports: a code, the place, the message, and the change that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str | int, ...]  # ("zero_optimization", "stage"); () is the whole file


@dataclass(frozen=True)
class Put:
    """Set the key at `path` to a value."""

    path: KeyPath
    value: Any


@dataclass(frozen=True)
class Drop:
    """Delete the key at `path`."""

    path: KeyPath


@dataclass(frozen=True)
class Rename:
    """Rename the key at `path`."""

    path: KeyPath
    key: str


Mend = Put | Drop | Rename


@dataclass(frozen=True)
class Finding:
    """`severity` is "error" (a recipe stops with exit status 2) or "warning" (printed once).

    `mends` are applied in order. They are given only if one change is certainly right.
    """

    code: str
    severity: str
    path: KeyPath
    message: str
    mends: tuple[Mend, ...] = ()


def error(code: str, place: str, message: str, *mends: Mend) -> Finding:
    """A finding that ends the run. `place` has dots: "fp16.enabled"."""
    return Finding(code, "error", at(place), message, mends)


def warning(code: str, place: str, message: str, *mends: Mend) -> Finding:
    """A finding that is printed once."""
    return Finding(code, "warning", at(place), message, mends)


def at(place: str) -> KeyPath:
    """("fp16", "enabled") for "fp16.enabled"."""
    return tuple(place.split(".")) if place else ()


def named(path: KeyPath) -> str:
    """The inverse of `at`: "fp16.enabled", "betas[0]"."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
