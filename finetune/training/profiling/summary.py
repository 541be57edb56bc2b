"""The parts of a step over ranks: as a record, as a table, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from finetune.training.profiling.parts import PARTS, Step

SHOWN_RANKS = 8  # of more ranks the page shows mean and largest alone
SECONDS = 1e-9


@dataclass(frozen=True)
class RankProfile:
    """What one rank found: its traced steps, and the times in seconds of steps before them that were not."""

    rank: int
    numbers: tuple[int, ...]  # of the steps
    steps: tuple[Step, ...]
    untraced_step_seconds: tuple[float, ...]
    on_gpu: bool
    writing_seconds: float

    def mean_seconds(self, part: str) -> float:
        """Of a part, in a step."""
        return mean(step.parts[part] for step in self.steps) * SECONDS

    @property
    def step_seconds(self) -> float:
        return mean(step.nanoseconds for step in self.steps) * SECONDS


def record(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """`summary.json`: what the table shows, and every step of every rank in whole nanoseconds."""
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


def rows(ranks: Sequence[RankProfile]) -> list[list[str]]:
    """The table by part in milliseconds a step, its header first and the whole step last."""
    shown = ranks if len(ranks) <= SHOWN_RANKS else ()
    header = ["part", "mean ms", "share", "max ms", *(f"rank {rank.rank}" for rank in shown)]
    whole = mean(rank.step_seconds for rank in ranks)
    table = [header]
    for part in PARTS:
        found = [rank.mean_seconds(part) for rank in ranks]
        own = [_ms(rank.mean_seconds(part)) for rank in shown]
        table.append([part, _ms(mean(found)), f"{mean(found) / whole:.1%}", _ms(max(found)), *own])
    longest = max(rank.step_seconds for rank in ranks)
    return [*table, ["step", _ms(whole), "100.0%", _ms(longest), *(_ms(rank.step_seconds) for rank in shown)]]


def plain(table: Sequence[Sequence[str]]) -> str:
    """For a terminal."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table]
    return "\n".join(map("  ".join, lines))


def page(ranks: Sequence[RankProfile]) -> str:
    """README.md of the folder."""
    table = rows(ranks)
    lines = ["# Where a step's time goes", "", f"{shares_line(ranks)}", ""]
    lines += [f"| {' | '.join(table[0])} |", "|---|" + "---:|" * (len(table[0]) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in table[1:]]
    lines += ["", "![One step by part and rank](parts.png)", ""]
    lines += _transfers(ranks)
    lines += [
        "Each part is exclusive, and they add up to the step. Communication is what no computation hid, with the wait "
        "for other ranks. `rank-N.json.gz` opens in https://ui.perfetto.dev (the file stays on your machine) and in "
        "chrome://tracing; docs/profiling.md of the toolkit reads one.",
    ]
    return "\n".join(lines) + "\n"


def shares_line(ranks: Sequence[RankProfile]) -> str:
    """Which steps, and what the looking cost."""
    first, last = ranks[0].numbers[0], ranks[0].numbers[-1]
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    untraced, traced = _untraced(ranks), mean(rank.step_seconds for rank in ranks)
    cost = (
        f"{traced / untraced:.2f}x the median of the {len(ranks[0].untraced_step_seconds)} untraced steps before"
        if untraced
        else "how much tracing slowed them is unknown, for no step before was left to compare"
    )
    writing = max(rank.writing_seconds for rank in ranks)
    return (
        f"profile: {which}, {len(ranks)} rank(s), {traced:.3f} s a step ({cost}); reading it took {writing:.1f} s once"
    )


def _transfers(ranks: Sequence[RankProfile]) -> list[str]:
    names = sorted({name for rank in ranks for step in rank.steps for name in step.calls})
    if not names:
        return []
    lines = ["| transfer | calls a step, mean | under way, ms a step, mean | max |", "|---|---:|---:|---:|"]
    for name in names:
        calls = mean(mean(step.calls.get(name, 0) for step in rank.steps) for rank in ranks)
        took = [mean(step.nanoseconds_of_operation.get(name, 0) for step in rank.steps) * SECONDS for rank in ranks]
        lines.append(f"| {name} | {calls:.1f} | {_ms(mean(took))} | {_ms(max(took))} |")
    return [*lines, "", "Under way, whether or not something was computed beside it.", ""]


def _untraced(ranks: Sequence[RankProfile]) -> float | None:
    every = [seconds for rank in ranks for seconds in rank.untraced_step_seconds]
    return median(every) if every else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
