"""The page of issue 17's cases: what the code did with each before, and what it does now.

    python benchmarks/pages.py nothing_silent

A row of docs/results/nothing_silent.json is a case that a test covers, which `by` names, or one that was tried by hand
on small inputs.
"""

from __future__ import annotations

from typing import Any


def page(rows: list[dict[str, str]]) -> str:
    lines = [
        "# No silent failures: each case, before and now",
        "",
        "Rendered by `python benchmarks/pages.py nothing_silent`. Each row is a case that once failed silently or",
        "unclearly, or that had not been tried. `verified by` names the test that covers it, or says that it was tried",
        "by hand: on tiny models, two steps, two cores, torch 2.13.0+cpu, transformers 5.23.0, accelerate 1.15.0,",
        "deepspeed 0.19.8.",
    ]
    for part in dict.fromkeys(row["part"] for row in rows):
        lines += ["", f"## {part}", "", "| case | before | now | verified by |", "|---|---|---|---|"]
        lines += [_line(row) for row in rows if row["part"] == part]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    cells = [row[name].replace("|", "\\|") for name in ("case", "before", "now", "by")]
    return f"| {' | '.join(cells)} |"
