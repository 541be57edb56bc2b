"""Results as rows of text: for a terminal by rich, and for OUTPUT/results.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune.bench.by_ddp import base_of, paired
from finetune.bench.compare import CONFIDENCE, Change, Ratio
from finetune.bench.published import AVERAGE_MEMORY, THROUGHPUT, published, study
from finetune.bench.result import Row, by_cell, middle
from finetune.drawing.markdown import cell

MIB = 2**20
HEADER = ("cell", "samples/s", "step ms", "planned", "by DDP", "published", "peak MiB", "planned", "average", "by DDP",
          "published", "last loss")  # fmt: skip
CHANGES = ("cell", "step time, new/old", "peak memory, new/old", "")


def results(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line a cell, of the repeat in the middle; "by DDP" is throughput and average memory by those of DDP, of the
    same model, world, global batch and precision, each repeat by the same repeat."""
    cells = by_cell(rows)
    done = [middle(repeats) for repeats in cells.values() if middle(repeats).is_done]
    lines = []
    for repeats in cells.values():
        base = base_of(middle(repeats), done, lambda row: row.place)
        lines.append(_line(repeats, cells[base.cell] if base else []))
    return lines


def _line(repeats: Sequence[Row], base: Sequence[Row]) -> tuple[str, ...]:
    row = middle(repeats)
    if not row.is_done:
        return (row.cell, f"{row.status}: {row.reason}", *[""] * (len(HEADER) - 2))
    what = row.model, row.layout, row.pipeline_parallel_size
    plan = row.planned or {}
    speed = row.samples_per_second or 0.0
    return (
        row.cell,
        f"{speed:,.1f}",
        f"{row.median_seconds * 1e3:,.1f}",
        _number(plan.get("step_seconds"), 1e-3, 1),
        _number(_by(repeats, base, lambda one: one.samples_per_second or 0.0)),
        _number(published(*what, THROUGHPUT)),
        f"{row.peak_bytes / MIB:,.1f}",
        _number(plan.get("peak_bytes"), MIB, 1),
        f"{row.average_bytes / MIB:,.1f}",
        _number(_by(repeats, base, lambda one: one.average_bytes)),
        _number(published(*what, AVERAGE_MEMORY)),
        f"{row.losses[-1]:.4f}" if row.losses else "",
    )


def _by(repeats: Sequence[Row], base: Sequence[Row], of: Callable[[Row], float]) -> float | None:
    ours, theirs = ({row.repeat: of(row) for row in rows if row.is_done} for rows in (repeats, base))
    return paired(ours, theirs)


def _number(value: float | None, unit: float = 1.0, digits: int = 2) -> str:
    return "" if value is None else f"{value / unit:,.{digits}f}"


def changes(found: Sequence[Change], threshold: float) -> list[tuple[str, ...]]:
    """A line a cell, the last column of those that are worse."""
    return [
        (one.cell, _ratio(one.seconds), _ratio(one.bytes), "REGRESSION " * one.is_worse(threshold) + (one.why or ""))
        for one in found
    ]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.low is None:
        return f"{ratio.value:.3f} (no interval: one repeat)"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def notes(rows: Sequence[Row]) -> list[str]:
    """What to know of the table's figures."""
    last = rows[-1]
    machine, versions = last.machine, last.versions
    where = ", ".join(machine.get("gpus") or []) or f"{machine.get('processor')}, {machine.get('cores')} core(s)"
    by = sorted({str(row.memory.get("measured_by")) for row in rows if row.is_done})
    lines = [
        f"{where}; torch {versions.get('torch')}, deepspeed {versions.get('deepspeed')}; "
        f"{last.started[:10]}; revision {', '.join(sorted({row.git_revision for row in rows}))}",
    ]
    if by:
        lines.append(f"peak and average: of the fullest rank, by {' and '.join(by)}")
    if (apart := losses_apart(rows)) is not None:
        lines.append(f"losses of the same model and global batch differ by at most {apart:.2%} in any step")
    if any(row.planned for row in rows):
        lines.append(f"planned: step ms and peak MiB by `finetune plan` on the profile {_profiles(rows)}")
    lines.append(f"published: {study()['title']}, {study()['machine']}, as ratios to its DDP ({study()['source']})")
    return lines


def _profiles(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({str(row.planned.get("machine")) for row in rows if row.planned}))


def losses_apart(rows: Sequence[Row]) -> float | None:
    """The most that losses of one step differ among cells that train the same, as a share: 0 where all are equal, NaN
    where one is no number, None where no two cells train the same."""
    groups: dict[object, list[list[float]]] = {}
    cells: dict[object, set[str]] = {}
    for row in rows:
        if row.is_done:
            groups.setdefault(row.place.setting, []).append(row.losses)
            cells.setdefault(row.place.setting, set()).add(row.cell)
    if not any(len(names) > 1 for names in cells.values()):
        return None
    steps = [step for group in groups.values() for step in zip(*group, strict=False)]
    if not all(map(math.isfinite, (loss for step in steps for loss in step))):
        return math.nan
    return max(((max(step) - min(step)) / max(map(abs, step)) for step in steps if any(step)), default=0.0)


def show(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """On the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(*map(Text, line))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=200).print(table)


def write_markdown(folder: Path, rows: Sequence[Row]) -> Path:
    """OUTPUT/results.md."""
    lines = [_markdown(HEADER), _markdown(["---"] + ["---:"] * (len(HEADER) - 1)), *map(_markdown, results(rows))]
    path = folder / "results.md"
    text = "\n".join(["# Benchmark", "", *lines, "", *(f"- {note}" for note in notes(rows))]) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(cell, cells))} |"


def worded(confidence: float = CONFIDENCE) -> str:
    """What the intervals are."""
    return f"in brackets the {confidence:.0%} interval: Welch's on logarithms of the repeats' medians"
