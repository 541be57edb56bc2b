"""The page and the picture of benchmarks/limit.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spread import spread

from finetune.report.run_pictures import part_bars
from finetune.report.shapes import WIDE
from finetune.report.svg import write_png

OUT = Path(__file__).resolve().parents[1] / "docs" / "results"
TIMED = 5  # steps of a round
PAIRS = 9  # of a pass by each attention
KINDS = ("products", "attention", "casts and copies", "norms and elementwise", "optimizer", "clipping and norm",
         "loader", "Python and dispatch")  # fmt: skip
NOTE = """Not shown: a GPU, several ranks, other batch sizes. What a product costs alone is with its operands warm in
the cache as far as they fit. "Python and dispatch" is what of a traced step no operator of torch accounts for, the
guards and the Trainer's loop among it; the profiler itself makes it longer, as the last column of the first table
says."""


def parts_of(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median share of a traced step by kind; what no operator accounts for is the last."""
    found = {kind: statistics.median(one["kinds"][kind] / one["traced_wall"] for one in rounds) for kind in KINDS[:-1]}
    return {**found, KINDS[-1]: max(0.0, 1 - sum(found.values()))}


def page(record: dict[str, Any]) -> str:
    rounds = min(len(job["rounds"]) for job in record["jobs"].values())
    lines = [
        "# How far a step is from what the machine can do",
        "",
        f"{record['machine']}. Made by `python benchmarks/limit.py`. Medians of {rounds} rounds of {TIMED} steps "
        "(smallest to largest). CPU seconds of the process.",
        "",
        "| job | precision | threads | load | step, ms | products alone, ms | their GFLOP/s | MFU | traced / not |",
        "|---|---|---:|---:|---|---|---|---|---|",
    ]
    for name, job in record["jobs"].items():
        done = job["rounds"]
        cells = [
            spread([1e3 * one["step"] for one in done], 1),
            spread([1e3 * one["products"] for one in done], 1),
            spread([one["flops"] / one["products"] / 1e9 for one in done], 0),
            spread([one["products"] / one["step"] for one in done], 2),
            spread([one["traced"] / one["step"] for one in done], 2),
        ]
        lines.append(f"| {name} | {job['precision']} | {job['threads']} | {job['load']:.1f} | {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: {job['what']}" for name, job in record["jobs"].items())]
    lines += ["", "A traced step by kind: its operators' own time by the clock, as shares of the step's:", ""]
    lines += ["| job | " + " | ".join(KINDS) + " |", "|---|" + "---:|" * len(KINDS)]
    for name, job in record["jobs"].items():
        parts = parts_of(job["rounds"])
        lines.append(f"| {name} | " + " | ".join(f"{parts[kind]:.1%}" for kind in KINDS) + " |")
    lines += ["", f"A forward and a backward pass by each attention, {PAIRS} turns, ms:", ""]
    lines += ["| job | sdpa | eager | sdpa / eager, by turns |", "|---|---|---|---|"]
    for name, job in record["jobs"].items():
        sdpa, eager = job["attention"]["sdpa"], job["attention"]["eager"]
        ratios = [one / other for one, other in zip(sdpa, eager, strict=True)]
        shown = (spread([1e3 * one for one in sdpa], 1), spread([1e3 * one for one in eager], 1), spread(ratios, 2))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", "![A step by kind](limit.png)", "", NOTE, ""])


def picture(record: dict[str, Any]) -> None:
    steps = {name: statistics.median(one["step"] for one in job["rounds"]) for name, job in record["jobs"].items()}
    rows = [
        (name, {kind: share * steps[name] for kind, share in parts_of(job["rounds"]).items()})
        for name, job in record["jobs"].items()
    ]
    write_png(OUT / "limit.png", [part_bars(rows, WIDE, "A step by kind")])
