"""The releases that a figure was measured with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}


def in_words(found: Mapping[str, str]) -> str:
    """As the pages of docs/results/ say them."""
    return ", ".join(f"{name} {number}" for name, number in found.items())
