"""Shared code of the benchmarks that compare a recipe with its peers in interleaved rounds.

A round (`turn`) is one process of each. Each ratio is taken within one round, so that a slow phase of the machine
affects both. Memory is the peak of the process above what it holds after importing its libraries; on a GPU, the
allocator's peak.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spread import spread

REPO = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 3  # excluded: memory is allocated and threads start
OURS = "ours"


class Peers:
    """Runs the recipe and its peers; `imports` has by name what each imports before it reads a row."""

    def __init__(self, scratch: Path, imports: Mapping[str, str], on_gpu: bool) -> None:
        self.scratch, self.count, self.on_gpu = scratch, 0, on_gpu
        self.held = {name: 0.0 if on_gpu else self._held(words) for name, words in imports.items()}

    def folder(self) -> Path:
        """The path of a new folder."""
        self.count += 1
        return self.scratch / f"run{self.count}"

    def recipe(self, script: str, folder: Path, flags: Mapping[str, Any], *words: str) -> dict[str, float]:
        """Run a recipe; seconds per step, and bytes."""
        values = {"output_dir": folder, "logging_steps": 1, "do_eval": False, "eval_strategy": "no", **flags}
        values |= {"save_strategy": "no"}
        self.run(script, *words, *flagged(values))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
        figures = json.loads((folder / "all_results.json").read_text())
        return self._figures(OURS, seconds, max(figures["peak_memory_gib_per_rank"]) * 2**30)

    def peer(self, name: str, script: str, folder: Path, flags: Mapping[str, Any], *words: str) -> dict[str, float]:
        """Run a peer's script, which writes `step_seconds` and `peak_bytes` to --result."""
        result = folder.with_suffix(".json")
        self.run(script, *words, *flagged({"result": result, **flags}))
        found = json.loads(result.read_text())
        return self._figures(name, found["step_seconds"], found["peak_bytes"])

    def run(self, *words: str) -> str:
        path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        done = subprocess.run([sys.executable, *words], cwd=REPO, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def _figures(self, name: str, seconds: Sequence[float], peak: float) -> dict[str, float]:
        return {"step_seconds": statistics.median(seconds[WARMUP_STEPS:]), "bytes": peak - self.held[name]}

    def _held(self, imports: str) -> float:
        code = f"import {imports}\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
        return float(self.run("-c", code.replace("; from", "\nfrom")).split()[-1])


def flagged(values: Mapping[str, Any]) -> list[str]:
    """Flags as command-line words."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def rows_of(turns: Sequence[Mapping[str, Mapping[str, float]]], others: Mapping[str, int]) -> list[str]:
    """A table row for each peer: rows per second, MiB, the figures in `others` with that many digits, and the ratios of
    speed and memory. A turn's figures have `rows`, the number of rows per step."""
    lines = []
    for name in turns[0]:
        cells = [name, spread([turn[name]["rows"] / turn[name]["step_seconds"] for turn in turns], 1)]
        cells.append(spread([turn[name]["bytes"] / 2**20 for turn in turns], 0))
        cells += [spread([turn[name][key] for turn in turns], digits) for key, digits in others.items()]
        if name == OURS:
            cells += ["", ""]
        else:
            cells.append(spread([turn[name]["step_seconds"] / turn[OURS]["step_seconds"] for turn in turns], 2))
            cells.append(spread([turn[OURS]["bytes"] / turn[name]["bytes"] for turn in turns], 2))
        lines.append(f"| {' | '.join(cells)} |")
    return lines
