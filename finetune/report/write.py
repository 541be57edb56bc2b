"""Read run and benchmark folders, and write their report.

write([Path("runs/seq_cls"), Path("runs/other")], html=Path("report.html"), command="finetune report ...")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.errors import RequestError, listed
from finetune.report.bench import Bench, is_bench, read_bench
from finetune.report.bench_sections import bench_sections
from finetune.report.page import Report, as_html, write_markdown
from finetune.report.page import write as write_text
from finetune.report.run_folder import RunFolder, is_run, read_run
from finetune.report.run_sections import card_heading, run_sections


def write(
    paths: Sequence[Path], html: Path | None = None, markdown: Path | None = None, command: str = ""
) -> list[str]:
    """Write the requested reports on any mix of run and benchmark folders; returns notes on what could not be read.
    Raises RequestError for a path that is neither, and if a file cannot be written."""
    runs, benches = read(paths)
    sections = [section for bench in benches for section in bench_sections(bench, named=len(benches) > 1)]
    report = Report(_title(runs, benches), (*sections, *(run_sections(runs) if runs else ())), command)
    if html is not None:
        write_text(html, as_html(report))
    if markdown is not None:
        write_markdown(report, markdown)
    found: list[RunFolder | Bench] = [*runs, *benches]
    return [f"{one.folder}: {note}" for one in found for note in one.notes]


def read(paths: Sequence[Path]) -> tuple[list[RunFolder], list[Bench]]:
    """The runs and benchmarks at `paths`. Raises RequestError for a path that is neither."""
    given: dict[Path, Path] = {}
    for path in paths:
        given.setdefault(path.parent if path.is_file() else path, path)
    runs, benches = list[RunFolder](), list[Bench]()
    for (folder, path), name in zip(given.items(), _names(list(given)), strict=True):
        if is_bench(folder):
            benches.append(read_bench(folder, name))
        elif is_run(folder):
            runs.append(read_run(folder, name))
        elif not folder.is_dir():
            found = "is neither a folder nor a regular file" if folder.exists() else "there is no such folder"
            raise RequestError(f"{folder}: {found}. Give the --output_dir of a run or of a benchmark.")
        else:
            what = "it" if path == folder else f"is a file, and its folder {folder}"
            raise RequestError(
                f"{path}: {what} holds neither a run (metrics.jsonl, all_results.json, ...) nor a benchmark "
                "(results.jsonl). Give the --output_dir of a recipe, or of `finetune bench`."
            )
    return runs, benches


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest distinct names: the folder's own, with parent folders if two are the same."""
    parts = [folder.absolute().parts[1:] or ("/",) for folder in folders]
    depths = range(1, max(map(len, parts), default=1) + 1)
    named = [["/".join(one[-depth:]) for one in parts] for depth in depths]
    return next((names for names in named if len(set(names)) == len(names)), named[-1])


def _title(runs: Sequence[RunFolder], benches: Sequence[Bench]) -> str:
    names = [*(bench.name for bench in benches), *(run.name for run in runs)]
    if len(names) == 1 and runs:
        heading = card_heading(runs[0])
        return f"{names[0]}: {heading}" if heading else names[0]
    words = f"{len(names)} runs" if not benches else "Benchmark" if len(names) == 1 else f"{len(names)} folders"
    return f"{words}: {listed(names, 4)}"
