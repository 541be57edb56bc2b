"""The page and the plot of benchmarks/limit.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spread import spread

from finetune.report.png import write_png
from finetune.report.run_pictures import part_bars
from finetune.report.shapes import WIDE

OUT = Path(__file__).resolve().parents[1] / "docs" / "results"
TIMED = 5  # timed steps per round
PAIRS = 7  # rounds that time a pass with and without SDPA
SHIPPED = "as shipped"
KINDS = ("products", "attention", "casts and copies", "norms and elementwise", "optimizer", "clipping and norm",
         "loader", "Python and dispatch")  # fmt: skip
NOTE = """*Python and dispatch* is the part of a traced step that no torch operator accounts for, such as the guards and
the Trainer's loop. The profiler itself makes it longer, as the last column of the first table shows. Products that run
alone have their operands in the cache, as far as they fit.

What this does not show: a GPU, several ranks, other batch sizes."""


def parts_of(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median shares of a traced step by kind; the last is the time that no operator accounts for."""
    found = {kind: statistics.median(one["kinds"][kind] / one["traced_wall"] for one in rounds) for kind in KINDS[:-1]}
    return {**found, KINDS[-1]: max(0.0, 1 - sum(found.values()))}


def page(record: dict[str, Any]) -> str:
    rounds = min(len(job["rounds"]) for job in record["jobs"].values())
    lines = [
        "# How close a training step is to the machine's limit",
        "",
        f"{record['machine']}. Made by `python benchmarks/limit.py`. Medians of {rounds} rounds of {TIMED} steps, with "
        "the range in parentheses. Times are CPU time of the process. Products alone are the step's matrix products, "
        "run without anything else. MFU is their time divided by that of the step.",
        "",
        "| job | precision | threads | load average | step, ms | products alone, ms | GFLOP/s of products | MFU "
        "| traced / untraced step |",
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
    lines += ["", "Wall-clock time of a traced step by kind of operator, as shares of the step:", ""]
    lines += ["| job | " + " | ".join(KINDS) + " |", "|---|" + "---:|" * len(KINDS)]
    for name, job in record["jobs"].items():
        parts = parts_of(job["rounds"])
        lines.append(f"| {name} | " + " | ".join(f"{parts[kind]:.1%}" for kind in KINDS) + " |")
    lines += [
        "",
        "One forward and backward pass on 2,048 tokens, in rows of the same length, with SDPA and without it "
        f"({PAIRS} interleaved rounds; ms): in bf16 the recipes attend without it up to 256 tokens or with dropout "
        "(finetune/models/short_attention.py). `minilm` has dropout, and `char` a causal mask.",
        "",
        "| job | precision | tokens in a row | sdpa | without | sdpa / without |",
        "|---|---|---:|---|---|---|",
    ]
    for name, job in record["jobs"].items():
        for row in job["attention"]:
            sdpa, without = ([1e3 * one for one in row[kind]] for kind in ("sdpa", "without"))
            ratios = [one / other for one, other in zip(sdpa, without, strict=True)]
            shown = " | ".join((spread(sdpa, 1), spread(without, 1), spread(ratios, 2)))
            lines.append(f"| {name} | {row['precision']} | {row['tokens']} | {shown} |")
    lines += switched(record.get("switches", {}))
    return "\n".join([*lines, "", "![Time of a step by kind of operator](limit.png)", "", NOTE, ""])


def switched(layouts: dict[str, Any]) -> list[str]:
    """A step of recipes/seq_cls.py with each switch turned off, and with other options of DDP."""
    if not layouts:
        return []
    lines = [
        "",
        "What each switch is worth in recipes/seq_cls.py (`python benchmarks/switches.py`: MiniLM, 16 rows of 32 "
        "tokens per rank, in the precision that the recipe chooses). Ratios are taken within one round: above 1, the "
        "step is slower than as shipped. `memory`: runs under ZeRO-2 with rows of 4 to 40 words.",
        "",
        "| layout (load average) | turned off, or changed | rounds | step / as shipped | CPU time / as shipped "
        "| page faults per step | peak memory, MiB |",
        "|---|---|---:|---|---|---:|---:|",
    ]
    for layout, found in layouts.items():
        shipped = found["turns"][SHIPPED]
        for name, turns in found["turns"].items():
            ratios = [
                spread([one[kind] / other[kind] for one, other in zip(turns, shipped, strict=True)], 2)
                for kind in ("wall", "cpu")
            ]
            faults = statistics.median(one["faults"] for one in turns)
            peak = f"{statistics.median(one['peak_mib'] for one in turns):,.0f}" if layout == "memory" else ""
            cells = f"{name} | {len(turns)} | {' | '.join(ratios)} | {faults:,.0f} | {peak}"
            lines.append(f"| {layout} ({found['load']:.1f}) | {cells} |")
    return lines


def picture(record: dict[str, Any]) -> None:
    steps = {name: statistics.median(one["step"] for one in job["rounds"]) for name, job in record["jobs"].items()}
    rows = [
        (name, {kind: share * steps[name] for kind, share in parts_of(job["rounds"]).items()})
        for name, job in record["jobs"].items()
    ]
    write_png(OUT / "limit.png", [part_bars(rows, WIDE, "Time of a step by kind of operator")])
