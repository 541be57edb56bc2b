"""How the pages of docs/results/ show repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int) -> str:
    """Median, with the range in parentheses."""
    low, middle, high = (f"{of(values):.{digits}f}" for of in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"
