r"""Does a long run leak? Watches 10,000 steps of a tiny model: memory, open files, threads, and the run folder.

    python benchmarks/long_run.py                                # the Trainer, ZeRO-2 on two ranks, the pipeline
    python benchmarks/long_run.py --runs trainer --steps 2000

Each rank's resident memory, open files and threads are sampled during the run, with the latest logged step. The first
fifth is warm-up and is excluded. It has 40 saves and 20 evaluations: glibc's heap reaches its size, in jumps of about a
megabyte, within the first twenty of each. The slope in bytes per step is that of a straight line through the means of
20 spans, with its 95% confidence interval (Student's t). A leak that matters would keep a tensor or a row at each step.
A figure counts as growing if its whole interval lies above GROWTH; the folder, if it grew by more than the rows of
metrics.jsonl. In that case the benchmark ends with status 1. Writes a row for each run to docs/results/long_run.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from durability_runs import CLASSIFIER, LANGUAGE, PIPE, REPO, SEQ, Run, rows_of
from killing import Launch
from releases import versions

OUT = REPO / "docs" / "results" / "long_run.jsonl"
SPANS = 20
WARM_UP = 0.2
SAMPLE_SECONDS = 0.5
SAVES, EVALUATIONS = 200, 100
GROWTH = {
    "rss_bytes": 512.0,
    "open_files": 1e-4,
    "threads": 1e-4,
}  # per step; for files and threads, one in 10,000 steps
FOLDER_BYTES_PER_ROW, FOLDER_SLACK = 600, 0.05  # for metrics.jsonl; and a share of the folder's largest size
STATE_BYTES = 2**20  # limit of trainer_state.json, for any number of steps
SETTINGS = {"save_strategy": "steps", "save_total_limit": 2, "logging_steps": 1, "eval_strategy": "steps"}
FEW = {**CLASSIFIER, "early_stopping_patience": None, "metric_for_best_model": None}
RUNS = {
    "trainer": Run(SEQ, 1, FEW, accumulation=1),
    "zero2": Run(SEQ, 2, {**FEW, "deepspeed": "zero2"}, accumulation=1),
    "pipeline": Run(PIPE, 2, {**LANGUAGE, "schedule_step": 0, "pipeline_parallel_size": 2}),
}


def watch(name: str, steps: int, home: Path) -> dict[str, Any]:
    """Run to the end, and record its ranks and its folder on the way."""
    run, folder = RUNS[name], home / name
    every = {
        **SETTINGS,
        "max_steps": steps,
        "save_steps": max(steps // SAVES, 1),
        "eval_steps": max(steps // EVALUATIONS, 1),
    }
    launch = Launch(run.command(folder, **every), folder, home / "cache", run.ranks)
    samples: list[list[dict[str, float]]] = [[] for _ in range(run.ranks)]
    sizes: list[tuple[int, int]] = []  # step, bytes of the run folder
    while not launch.has_ended():
        time.sleep(SAMPLE_SECONDS)
        step = last_step(folder)
        if not step or step >= steps:  # not training yet, or evaluating and writing the report
            continue
        for rank, process in enumerate(launch.ranks()):
            with suppress(psutil.Error):
                samples[rank].append({"step": step, **look(process)})
        sizes.append((step, size_of(folder)))
    if launch.wait() != 0:
        raise SystemExit(launch.output[-3000:])
    row: dict[str, Any] = {"run": name, "recipe": run.recipe, "ranks": run.ranks, "steps": steps}
    row |= {"saves": SAVES, "evaluations": EVALUATIONS}
    row["seconds"] = round(time.time() - launch.began, 1)
    row["per_rank"] = [slopes(of_rank) for of_rank in samples]
    row["folder"] = sizes_of(folder, sizes, launch)
    return row | {"versions": versions()}


def growth(row: dict[str, Any]) -> list[str]:
    """What grew; empty if nothing did."""
    found = []
    for rank, figures in enumerate(row["per_rank"]):
        for name, most in GROWTH.items():
            if figures[name]["interval"][0] > most:
                found.append(f"rank {rank}: {name} by {figures[name]['slope_per_step']:.4g} per step")
    held = row["folder"]
    rows = held["metrics_rows"] * FOLDER_BYTES_PER_ROW
    if held["most_bytes_second_half"] > held["most_bytes_first_half"] * (1 + FOLDER_SLACK) + rows:
        found.append("the run folder")
    found += ["trainer_state.json"] if held["trainer_state_bytes"] > STATE_BYTES else []
    return found


def look(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        return {
            "rss_bytes": process.memory_info().rss,
            "open_files": process.num_fds(),
            "threads": process.num_threads(),
        }


def last_step(folder: Path) -> int:
    """The step in the last complete line of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().split(b"\n")
    with suppress(IndexError, json.JSONDecodeError):
        return int(json.loads(lines[-2])["step"])
    return 0


def size_of(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                total += (Path(base) / name).stat().st_size
    return total


def slopes(samples: list[dict[str, float]]) -> dict[str, Any]:
    """For each figure of one rank: the slope per step with its 95% interval, and the first and last means."""
    import numpy as np
    from scipy import stats

    last = samples[-1]["step"]
    kept = [sample for sample in samples if sample["step"] > WARM_UP * last]
    found: dict[str, Any] = {"samples": len(kept)}
    for figure in ("rss_bytes", "open_files", "threads"):
        parts = [part for part in np.array_split([(s["step"], s[figure]) for s in kept], SPANS) if len(part)]
        means = np.array([part.mean(axis=0) for part in parts])
        line = stats.linregress(means[:, 0], means[:, 1])
        wide = float(np.nan_to_num(line.stderr) * stats.t.ppf(0.975, len(means) - 2))  # NaN for a constant
        found[figure] = {
            "slope_per_step": float(line.slope),
            "interval": [float(line.slope) - wide, float(line.slope) + wide],
            "first": float(means[0, 1]),
            "last": float(means[-1, 1]),
        }
    return found


def sizes_of(folder: Path, sizes: list[tuple[int, int]], launch: Launch) -> dict[str, Any]:
    """Bytes of the run folder during the run, and of files that could grow, at its end."""
    last = sizes[-1][0]
    half, later = ([size for step, size in sizes if low < step / last <= high] for low, high in ((0.2, 0.6), (0.6, 1)))
    checkpoints = sorted(folder.glob("checkpoint-*"))
    states = [(path / "trainer_state.json").stat().st_size for path in checkpoints]
    return {
        "most_bytes_first_half": max(half, default=0),
        "most_bytes_second_half": max(later, default=0),
        "checkpoints": len(checkpoints),
        "trainer_state_bytes": max(states, default=0),
        "metrics_bytes": (folder / "metrics.jsonl").stat().st_size,
        "metrics_rows": sum(1 for _ in rows_of(folder / "metrics.jsonl")),
        "terminal_bytes": launch.log.stat().st_size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--anew", action="store_true", help="discard the earlier rows")
    options = parser.parse_args()
    if options.anew:
        options.out.unlink(missing_ok=True)
    done = {(row["run"], row["steps"]) for row in rows_of(options.out)}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.runs:
            if (name, options.steps) in done:
                continue
            row = watch(name, options.steps, Path(folder))
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            for rank, found in enumerate(row["per_rank"]):
                slope = found["rss_bytes"]
                low, high = slope["interval"]
                files, threads = found["open_files"], found["threads"]
                print(
                    f"{name} rank {rank}: {slope['slope_per_step']:.0f} bytes per step ({low:.0f} to {high:.0f}), "
                    f"{files['first']:.0f} to {files['last']:.0f} files, "
                    f"{threads['first']:.0f} to {threads['last']:.0f} threads",
                    flush=True,
                )
            print(json.dumps(row["folder"]))
    grew = {row["run"]: growth(row) for row in rows_of(options.out)}
    for name, what in grew.items():
        print(f"{name}: {'flat' if not what else 'GREW: ' + ', '.join(what)}")
    return 1 if any(grew.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
