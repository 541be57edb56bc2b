"""`finetune bench`: run a grid of models and layouts, each in a real launch, or show earlier results."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from finetune.bench import table
from finetune.bench.cell import machine_for, plan_of_cell, why_not
from finetune.bench.compare import CONFIDENCE, compare
from finetune.bench.grid import read_grid
from finetune.bench.result import Row, command_to_go_on, left_to_run, read_results, read_rows
from finetune.bench.runner import Bench, progress_line
from finetune.errors import INTERRUPTED, RequestError
from finetune.host.hardware import gpu_names


def run(asked: argparse.Namespace) -> int:
    """The exit status. 0: some cell was measured; 1: none was, or one is worse than in --compare; 2: the request was
    wrong; 130: Ctrl-C."""
    old = read_rows(Path(asked.compare)) if asked.compare else None
    if old == []:
        raise RequestError(f"--compare {asked.compare}: it has no results yet. Give a benchmark that has run.")
    if not 0 <= asked.threshold < 10:
        raise RequestError(f"--threshold is {asked.threshold}, but it must be 0 or more, such as 0.05 for 5%.")
    target = Path(asked.target)
    if target.is_dir() or target.suffix == ".jsonl":
        _refuse_to_run(asked)
        return _show(target, old, asked.threshold)
    bench = _bench(asked)
    if asked.dry_run:
        return _list(bench, asked.only)
    many = len(bench.due(asked.only))  # refuses an unknown name before anything is written
    bench.open(asked.resume)
    try:
        for number, row in enumerate(bench.run(asked.only), start=1):
            print(progress_line(row, number, many), flush=True)
    except KeyboardInterrupt:
        return _stopped(bench, asked, many)
    rows = bench.rows()
    _write(bench.folder, rows)
    return _judge(rows, old, asked.threshold)


def _show(target: Path, old: list[Row] | None, threshold: float) -> int:
    """Show the results of a benchmark that has run, and how many launches are left."""
    rows, torn = read_results(target)
    if not rows:
        raise RequestError(f"{target}: there are no results yet.")
    _say(rows)
    if torn:
        print(f"{torn} {'line' if torn == 1 else 'lines'} of its results skipped: incomplete, after a kill")
    left, many = left_to_run(target, rows)
    if left:
        command = command_to_go_on(target)
        print(f"{left} of {many} launches have not run yet{f'; `{command}` runs them' if command else ''}")
    return _judge(rows, old, threshold)


def _stopped(bench: Bench, asked: argparse.Namespace, many: int) -> int:
    """After Ctrl-C: write the results so far, and print how to continue."""
    done = many - len(bench.due(asked.only))
    if rows := bench.rows():
        _write(bench.folder, rows)
    how = "the same command" + ("" if asked.resume else " with --resume")
    print(f"\nstopped; {done} of {many} launches done; {how} goes on", file=sys.stderr)
    return INTERRUPTED


def _refuse_to_run(asked: argparse.Namespace) -> None:
    """Raises RequestError for a flag that needs a run, where results are only shown."""
    flags = ("output_dir", "resume", "scale", "repeats", "only", "dry_run", "machine")
    if flag := next((name for name in flags if getattr(asked, name) not in (None, False)), None):
        command = command_to_go_on(Path(asked.target)) if flag == "resume" else None
        if command:
            raise RequestError(f"--resume: {asked.target} has run, and is only shown. To go on: `{command}`.")
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
    """Print the cells that would run, with the plan for each."""
    due = bench.due(only)
    lines = []
    for repeat, cell in due:
        plan = plan_of_cell(cell, bench.grid.models[cell.model], bench.machine) or {}
        seconds, size = plan.get("step_seconds"), plan.get("peak_bytes")
        figures = (f"{seconds * 1e3:,.1f}", f"{size / 2**20:,.1f}") if seconds and size else ("", "")
        lines.append((cell.name, str(repeat), *figures, why_not(cell) or ""))
    table.show(("cell", "repeat", "planned step ms", "planned peak MiB", "not run, because"), lines)
    print(f"{len(due)} launches; nothing was started.")
    return 0


def _say(rows: list[Row]) -> None:
    table.show(table.HEADER, table.results(rows))
    print(*table.notes(rows), sep="\n")


def _write(folder: Path, rows: list[Row]) -> None:
    """Print the table; write it to results.md, and write the report."""
    _say(rows)
    print(f"wrote {table.write_markdown(folder, rows)}")
    _write_page(folder)


def _judge(rows: list[Row], old: list[Row] | None, threshold: float) -> int:
    """The exit status, from what was measured and what is worse than in `old`."""
    status = 0 if any(row.is_done for row in rows) else 1
    if status:
        print("no cell was measured", file=sys.stderr)
    if old is None:
        return status
    found = compare(rows, old)
    table.show(table.CHANGES, table.changes(found, threshold))
    print(f"in brackets the {CONFIDENCE:.0%} interval: Welch's, on the logarithms of the repeats' medians")
    if rows[-1].machine != old[-1].machine:
        print("warning: the two ran on different machines, so their times are not comparable")
    worse = [one.cell for one in found if one.is_worse(threshold)]
    undecided = sum(one.is_undecided for one in found)
    if worse or undecided < sum(one.seconds is not None for one in found):
        print(f"worse by more than {threshold:.0%}: {', '.join(worse) or 'none'}")
    if undecided:
        print(f"undecided: {undecided} cells have one repeat. Run both with --repeats 3 or more.")
    return 1 if worse else status


def _write_page(folder: Path) -> None:
    """Write OUTPUT/report.html and report.md, as `finetune report` does."""
    from finetune.report.write import write

    pages = folder / "report.html", folder / "report.md"
    for note in write([folder], *pages, shlex.join(["finetune", *sys.argv[1:]])):
        print(f"note: {note}", file=sys.stderr)
    print(*(f"wrote {page}" for page in pages), sep="\n")
