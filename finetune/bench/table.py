"""Results as rows of text, for the terminal (with rich) and for OUTPUT/results.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from finetune.bench.compare import Change, Ratio
from finetune.bench.result import Row
from finetune.report.bench import Bench, Cell, cells_of
from finetune.report.published import AVERAGE_MEMORY, THROUGHPUT, published, study
from finetune.report.table import Table, print_table
from finetune.report.text import MIB, fixed

HEADER = ("cell", "samples/s", "step ms", "planned", "x DDP", "published", "peak MiB", "planned", "average", "x DDP",
          "published", "last loss")  # fmt: skip
CHANGES = ("cell", "step time, new/old", "peak memory, new/old", "")


def results(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line per cell. "x DDP" is throughput, or average memory, divided by that of DDP with the same model, world
    size, global batch and precision, each repeat by the same repeat."""
    bench = Bench("", Path(), cells_of(map(asdict, rows)))
    return [_line(bench, cell) for cell in bench.cells]


def _line(bench: Bench, cell: Cell) -> tuple[str, ...]:
    if not cell.done:
        return (cell.name, f"{cell.status}: {cell.word('reason')}", *[""] * (len(HEADER) - 2))
    what = cell.model, cell.layout, cell.count("pipeline_parallel_size", 1)
    return (
        cell.name, fixed(cell.rate, ",.1f"), fixed(cell.step_seconds, ",.1f", 1e-3),
        fixed(cell.planned("step_seconds"), ",.1f", 1e-3), fixed(bench.rate_to_ddp(cell), ",.2f"),
        fixed(published(*what, THROUGHPUT)),
        fixed(cell.most("peak_bytes"), ",.1f", MIB), fixed(cell.planned("peak_bytes"), ",.1f", MIB),
        fixed(cell.most("average_bytes"), ",.1f", MIB), fixed(bench.memory_to_ddp(cell), ",.2f"),
        fixed(published(*what, AVERAGE_MEMORY)), fixed(cell.final_loss, ",.4f"),
    )  # fmt: skip


def changes(found: Sequence[Change], threshold: float) -> list[tuple[str, ...]]:
    """A line per cell; the last column marks regressions."""
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
    where = " | ".join(dict.fromkeys(map(_where, rows)))
    by = sorted({str(row.memory.get("measured_by")) for row in rows if row.is_done})
    lines = [
        f"{where}; {rows[-1].started[:10]}; revision {', '.join(sorted({row.git_revision for row in rows}))}",
    ]
    if by:
        lines.append(f"peak and average: of the fullest rank, measured by {' and '.join(by)}")
    if (apart := losses_apart(rows)) is not None:
        lines.append(f"losses of the same model and global batch differ by at most {apart:.2%} in any step")
    if any(row.planned for row in rows):
        profiles = ", ".join(sorted({str(row.planned.get("machine")) for row in rows if row.planned}))
        lines.append(f"planned: step ms and peak MiB by `finetune plan` on the profile {profiles}")
    lines.append(f"published: {study()['title']}, {study()['machine']}, as ratios to its DDP ({study()['source']})")
    return lines


def _where(row: Row) -> str:
    machine, versions = row.machine, row.versions
    on = ", ".join(machine.get("gpus") or []) or f"{machine.get('processor')}, {machine.get('cores')} core(s)"
    return f"{on}; torch {versions.get('torch')}, deepspeed {versions.get('deepspeed')}"


def losses_apart(rows: Sequence[Row]) -> float | None:
    """The largest relative difference between the losses of one step among cells that train the same; NaN if a loss is
    not finite, None if no two cells train the same."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells_of(map(asdict, rows)):
        if cell.done:
            groups.setdefault(cell.setting, []).append(cell)
    if all(len(cells) < 2 for cells in groups.values()):
        return None
    runs = ([row["losses"] for cell in cells for row in cell.done] for cells in groups.values())
    steps = [step for losses in runs for step in zip(*losses, strict=False)]
    if not all(map(math.isfinite, (loss for step in steps for loss in step))):
        return math.nan
    return max(((max(step) - min(step)) / max(map(abs, step)) for step in steps if any(step)), default=0.0)


def show(header: Sequence[str], lines: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console

    console = Console()
    print_table(console if console.is_terminal else Console(width=200), Table("", tuple(header), tuple(lines)))


def write_markdown(folder: Path, rows: Sequence[Row]) -> Path:
    path, table = folder / "results.md", Table("", HEADER, tuple(results(rows)))
    path.write_text(
        "\n".join(["# Benchmark", "", table.markdown, "", *(f"- {note}" for note in notes(rows)), ""]), "utf-8"
    )
    return path
