"""`finetune bench`: a grid of models and layouts, each a real launch, or the results of one once more."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from finetune.bench import table
from finetune.bench.compare import compare
from finetune.bench.grid import read_grid
from finetune.bench.launching import why_not
from finetune.bench.planned import machine_for, planned
from finetune.bench.result import Row, read_rows
from finetune.bench.runner import Bench, headline
from finetune.errors import RequestError
from finetune.here import gpu_names


def run(asked: argparse.Namespace) -> int:
    """0: it ran, whatever came of the cells; 1: something is worse than in --compare; 2: the request was wrong."""
    old = read_rows(Path(asked.compare)) if asked.compare else None
    if old == []:
        raise RequestError(f"--compare {asked.compare}: it has no results yet. Give a benchmark that has run.")
    if not 0 <= asked.threshold < 10:
        raise RequestError(f"--threshold is {asked.threshold}, but it must be 0 or more, such as 0.05 for 5%.")
    target = Path(asked.target)
    if target.is_dir() or target.suffix == ".jsonl":
        _refuse_to_run(asked)
        rows = read_rows(target)
        folder = None
    else:
        bench = _bench(asked)
        if asked.dry_run:
            return _list(bench, asked.only)
        folder = bench.folder
        rows = _run(bench, asked)
    if not rows:
        raise RequestError(f"{target}: there are no results yet.")
    return _say(rows, old, asked.threshold, folder)


def _refuse_to_run(asked: argparse.Namespace) -> None:
    """Raises RequestError for a flag of a run where results are only shown."""
    flags = ("output_dir", "resume", "scale", "repeats", "only", "dry_run", "machine")
    if flag := next((name for name in flags if getattr(asked, name) not in (None, False)), None):
        raise RequestError(
            f"--{flag}: {asked.target} has run, and is only shown. Give the grid's YAML to run, such as "
            f"`finetune bench recipes/configs/bench_laptop.yaml --{flag} ...`; or drop --{flag}."
        )


def _bench(asked: argparse.Namespace) -> Bench:
    if asked.repeats is not None and asked.repeats < 1:
        raise RequestError(f"--repeats is {asked.repeats}, but it must be 1 or more.")
    grid = read_grid(asked.target, asked.scale, asked.repeats)
    folder = Path(asked.output_dir or f"runs/{Path(asked.target).stem}")
    return Bench(grid, folder, machine_for(asked.machine, gpu_names()), Path(asked.target))


def _list(bench: Bench, only: str | None) -> int:
    """The cells that would be run, with what is planned of each."""
    due = bench.due(only)
    lines = []
    for repeat, cell in due:
        plan = planned(cell, bench.grid.models[cell.model], bench.machine) or {}
        seconds, size = plan.get("step_seconds"), plan.get("peak_bytes")
        figures = (f"{seconds * 1e3:,.1f}", f"{size / 2**20:,.1f}") if seconds and size else ("", "")
        lines.append((cell.name, str(repeat), *figures, why_not(cell) or ""))
    table.show(("cell", "repeat", "planned step ms", "planned peak MiB", "not run, because"), lines)
    print(f"{len(due)} launches; nothing was started.")
    return 0


def _run(bench: Bench, asked: argparse.Namespace) -> list[Row]:
    many = len(bench.due(asked.only))  # which refuses a name that is none, before anything is written
    bench.open(asked.resume)
    for number, row in enumerate(bench.run(asked.only), start=1):
        print(headline(row, number, many), flush=True)
    return bench.rows()


def _say(rows: list[Row], old: list[Row] | None, threshold: float, folder: Path | None) -> int:
    table.show(table.HEADER, table.results(rows))
    print(*table.notes(rows), sep="\n")
    if folder is not None:
        print(f"wrote {table.write_markdown(folder, rows)}")
        _write_page(folder)
    if old is None:
        return 0
    found = compare(rows, old)
    table.show(table.CHANGES, table.changes(found, threshold))
    print(table.worded())
    if rows[-1].machine != old[-1].machine:
        print("warning: the two are not of one machine, and their times not comparable")
    worse = [one.cell for one in found if one.is_worse(threshold)]
    undecided = sum(one.is_undecided for one in found)
    if worse or undecided < sum(one.seconds is not None for one in found):
        print(f"worse by more than {threshold:.0%}: {', '.join(worse) or 'none'}")
    if undecided:
        print(f"undecided: {undecided} cells have one repeat. Run both with --repeats 3 or more.")
    return 1 if worse else 0


def _write_page(folder: Path) -> None:
    """OUTPUT/report.html and report.md, as `finetune report` writes them."""
    from finetune.report.write import write

    pages = folder / "report.html", folder / "report.md"
    for note in write([folder], *pages, shlex.join(["finetune", *sys.argv[1:]])):
        print(f"note: {note}", file=sys.stderr)
    print(*(f"wrote {page}" for page in pages), sep="\n")
