"""Is one benchmark slower or larger than another? A ratio and confidence interval per cell. Never imports torch.

The interval is Welch's, on the logarithms of the repeats' medians: errors are relative, repeats are few, and the two
benchmarks may have different variances (Welch, Biometrika 34, 1947, for the degrees of freedom). Steps of one launch
are not repeats: a whole launch may be slow. With fewer than two repeats on one side there is no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.bench.result import Row, by_cell

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """New / old; `low` and `high` are None if there is no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def is_worse(self, threshold: float) -> bool:
        """Whether the whole interval is more than `threshold` above 1."""
        return self.low is not None and self.low > 1 + threshold


@dataclass(frozen=True)
class Change:
    """The change in one cell. `why`: why it is not compared; `broke`: it used to run, and no longer does."""

    cell: str
    seconds: Ratio | None = None
    bytes: Ratio | None = None
    why: str | None = None
    broke: bool = False

    @property
    def is_undecided(self) -> bool:
        return any(ratio is not None and ratio.low is None for ratio in (self.seconds, self.bytes))

    def is_worse(self, threshold: float) -> bool:
        return self.broke or any(
            ratio is not None and ratio.is_worse(threshold) for ratio in (self.seconds, self.bytes)
        )


def compare(new: Sequence[Row], old: Sequence[Row]) -> list[Change]:
    """The changes, in the order of `new`; then cells that only `old` has."""
    ours, theirs = by_cell(new), by_cell(old)
    changes = []
    for cell, rows in ours.items():
        before = [row for row in theirs.get(cell, []) if row.is_done]
        now = [row for row in rows if row.is_done]
        if cell not in theirs:
            changes.append(Change(cell, why="new"))
        elif other := _differ(rows[0], theirs[cell][0]):
            changes.append(Change(cell, why=f"not compared: {other}"))
        elif not before:
            changes.append(Change(cell, why=f"was {theirs[cell][0].status}" + (", runs now" if now else "")))
        elif not now:
            changes.append(Change(cell, why=f"ran before, now {rows[0].status}: {rows[0].reason}", broke=True))
        else:
            seconds = ratio(now, before, lambda row: row.median_seconds)
            changes.append(Change(cell, seconds, ratio(now, before, lambda row: row.peak_bytes)))
    return changes + [Change(cell, why="not run this time") for cell in theirs if cell not in ours]


def _differ(new: Row, old: Row) -> str:
    """What differs besides the cell's name, so that the two did different work; "" if nothing does."""
    pairs = [(name, getattr(new, name), getattr(old, name)) for name in ("scale", "global_batch", "steps")]
    found = [f"{name} is {ours}, and was {theirs}" for name, ours, theirs in pairs if ours != theirs]
    if new.model_sha256 != old.model_sha256:
        found.append("the model's sizes differ")
    return ", ".join(found)


def ratio(new: Sequence[Row], old: Sequence[Row], of: Callable[[Row], float]) -> Ratio | None:
    """The ratio of the geometric means over repeats; None if any value is 0."""
    if min(of(row) for row in (*new, *old)) <= 0:
        return None
    logs = [[math.log(of(row)) for row in rows] for rows in (new, old)]
    difference = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    if min(map(len, logs)) < 2:
        return Ratio(math.exp(difference))
    shares = [statistics.variance(side) / len(side) for side in logs]
    if sum(shares) == 0:
        return Ratio(*[math.exp(difference)] * 3)
    freedom = sum(shares) ** 2 / sum(share**2 / (len(side) - 1) for share, side in zip(shares, logs, strict=True))
    reach = _student(freedom) * math.sqrt(sum(shares))
    return Ratio(*(math.exp(difference + by) for by in (0.0, -reach, reach)))


def _student(freedom: float) -> float:
    """The two-sided quantile of Student's t for CONFIDENCE."""
    from scipy.special import stdtrit  # needs numpy

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
