"""The parts of a step across ranks: as a record, a table, a page and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from finetune.report.charts import Piece, timeline
from finetune.report.page import markdown
from finetune.report.png import write_png
from finetune.report.run_pictures import part_bars, part_table
from finetune.report.shapes import WIDE, Picture, colour_of
from finetune.report.table import Table
from finetune.training.profiling.parts import PARTS, Step

SECONDS, SHOWN_LANES = 1e-9, 16


@dataclass(frozen=True)
class RankProfile:
    """One rank's results: its traced steps, and the durations in seconds of untraced steps before them."""

    rank: int
    numbers: tuple[int, ...]  # the steps' numbers
    steps: tuple[Step, ...]
    untraced_step_seconds: tuple[float, ...]
    on_gpu: bool
    writing_seconds: float

    def mean_seconds(self, part: str) -> float:
        """Mean time of a part per step."""
        return mean(step.parts[part] for step in self.steps) * SECONDS

    @property
    def step_seconds(self) -> float:
        return mean(step.nanoseconds for step in self.steps) * SECONDS


def record(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """The content of `summary.json`: the table's numbers, and every step of every rank in whole nanoseconds."""
    by_part = {part: [rank.mean_seconds(part) for rank in ranks] for part in PARTS}
    return {
        "device": "cuda" if ranks[0].on_gpu else "cpu",
        "steps": list(ranks[0].numbers),
        "step_seconds": mean(rank.step_seconds for rank in ranks),
        "untraced_step_seconds": _untraced(ranks),
        "mean_seconds": {part: mean(found) for part, found in by_part.items()},
        "max_seconds": {part: max(found) for part, found in by_part.items()},
        "ranks": [
            {
                "rank": rank.rank,
                "trace": trace_name(rank.rank),
                "untraced_step_seconds": list(rank.untraced_step_seconds),
                "writing_seconds": rank.writing_seconds,
                "steps": [
                    {
                        "step": number,
                        "nanoseconds": step.nanoseconds,
                        "parts_nanoseconds": step.parts,
                        "transfers": {
                            name: {"calls": calls, "nanoseconds": step.nanoseconds_of_operation[name]}
                            for name, calls in step.calls.items()
                        },
                    }
                    for number, step in zip(rank.numbers, rank.steps, strict=True)
                ],
            }
            for rank in ranks
        ],
    }


def trace_name(rank: int) -> str:
    return f"rank-{rank}.json.gz"


def by_part(ranks: Sequence[RankProfile]) -> Table:
    """Milliseconds per step, with the whole step last."""
    return part_table(_means(ranks))


def _means(ranks: Sequence[RankProfile]) -> list[tuple[str, dict[str, float]]]:
    return [(f"rank {rank.rank}", {part: rank.mean_seconds(part) for part in PARTS}) for rank in ranks]


def plot_parts(ranks: Sequence[RankProfile], path: Path) -> None:
    """Plot a timeline of the middle traced step, and the mean of all traced steps."""
    shown, number = ranks[:SHOWN_LANES], len(ranks[0].steps) // 2
    colours = {part: colour_of(place) for place, part in enumerate(PARTS)}
    rows = {
        f"rank {rank.rank}": [Piece(start / 1e6, end / 1e6, colours[part]) for part in PARTS
                              for start, end in rank.steps[number].pieces[part]] for rank in shown
    }  # fmt: skip
    until = max(rank.steps[number].nanoseconds for rank in shown) / 1e6
    title = f"Timeline of step {shown[0].numbers[number]}; each rank from its own start"
    words = "milliseconds since the step began"
    in_time = timeline(Picture(title, "", WIDE), rows, until, words, list(colours.items()))
    write_png(path, [in_time, part_bars(_means(shown), WIDE, f"Mean of {len(shown[0].steps)} step(s)")])


def page(ranks: Sequence[RankProfile]) -> str:
    """The content of the folder's README.md."""
    transfers = _transfers(ranks)
    return markdown("profile.md").render(told=shares_line(ranks), table=by_part(ranks), transfers=transfers)


def shares_line(ranks: Sequence[RankProfile]) -> str:
    """Which steps were traced, and what tracing cost."""
    first, last = ranks[0].numbers[0], ranks[0].numbers[-1]
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    untraced, traced = _untraced(ranks), mean(rank.step_seconds for rank in ranks)
    cost = (
        f"{traced / untraced:.2f}x the median of the {len(ranks[0].untraced_step_seconds)} untraced steps before"
        if untraced
        else "how much tracing slowed them is unknown: no earlier step is left to compare"
    )
    writing = max(rank.writing_seconds for rank in ranks)
    return (
        f"profile: {which}, {len(ranks)} rank(s), {traced:.3f} s a step ({cost}); reading it took {writing:.1f} s once"
    )


def _transfers(ranks: Sequence[RankProfile]) -> Table | None:
    rows = []
    for name in sorted({name for rank in ranks for step in rank.steps for name in step.calls}):
        calls = mean(mean(step.calls.get(name, 0) for step in rank.steps) for rank in ranks)
        took = [mean(step.nanoseconds_of_operation.get(name, 0) for step in rank.steps) * SECONDS for rank in ranks]
        rows.append((name, f"{calls:.1f}", f"{mean(took) * 1e3:.1f}", f"{max(took) * 1e3:.1f}"))
    columns = ("transfer", "calls per step, mean", "in progress, ms per step, mean", "max")
    return Table("", columns, tuple(rows)) if rows else None


def _untraced(ranks: Sequence[RankProfile]) -> float | None:
    every = [seconds for rank in ranks for seconds in rank.untraced_step_seconds]
    return median(every) if every else None
