"""The package releases that were used for a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}


def in_words(found: Mapping[str, str]) -> str:
    """As text, for the pages of docs/results/."""
    return ", ".join(f"{name} {number}" for name, number in found.items())
