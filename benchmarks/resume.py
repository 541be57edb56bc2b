r"""Is a run that was interrupted and resumed bit-identical to one that was not? Cuts every layout at 12 steps.

    python benchmarks/resume.py                                    # all of them; continues where it stopped
    python benchmarks/resume.py --runs zero2 pipeline --cuts 5 8   # some of them
    python benchmarks/resume.py --anew                             # discards the earlier rows

Each run of durability_runs.py trains for 13 steps, 5 per epoch, without a cut and with a save at every step. It trains
once more without saving, to see whether two launches agree. Then, for each cut, a new launch with `--resume auto`
starts from a copy of the folder as a kill right after that save would leave it. The comparison covers the weights
(torch.equal), every logged figure except times, and the last checkpoint's best metric, callback states and random
states. Writes a row for each to docs/results/resume.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from durability_runs import (
    REPO,
    RUNS,
    Run,
    checkpoints,
    different_rows,
    different_weights,
    environment,
    rows_of,
)
from releases import versions

OUT = REPO / "docs" / "results" / "resume.jsonl"
STEPS = 13
CUTS = range(1, STEPS)
TIMEOUT_SECONDS = 240
STATE_FIGURES = ("best_metric", "best_global_step", "total_flos", "epoch", "global_step", "stateful_callbacks")


def launch(run: Run, folder: Path, cache: Path, **flags: Any) -> str | None:
    """Run to the end. None, or why it failed; for a hanging run, with the stacks of its processes."""
    command = run.command(folder, max_steps=STEPS, **flags)
    env = {**environment(cache), "PYTHONFAULTHANDLER": "1"}  # on SIGABRT, Python prints the stacks of its threads
    with subprocess.Popen(
        command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            for one in psutil.Process(process.pid).children(recursive=True)[::-1]:
                one.send_signal(signal.SIGABRT)
            process.send_signal(signal.SIGABRT)
            output, _ = process.communicate()
            return f"longer than {TIMEOUT_SECONDS} s: {output[-6000:]}"
    return None if process.returncode == 0 else f"status {process.returncode}: {output[-1500:]}"


def cut_off(uncut: Path, step: int, folder: Path) -> Path:
    """`uncut` as a kill right after the save at `step` leaves it. Uses links, because no run writes to a checkpoint."""
    folder.mkdir()
    for path in uncut.iterdir():
        if path.is_file() and path.name in ("recipe.yaml", "environment.json", "metrics.jsonl", "samples.md"):
            shutil.copy(path, folder)
    shutil.copytree(uncut / f"checkpoint-{step}", folder / f"checkpoint-{step}", copy_function=_link)
    return folder


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def different_states(one: Path, other: Path) -> list[str]:
    """Differences between the last checkpoints of two runs: figures of the state, and each rank's random state."""
    import torch  # imported here, because pages are rendered without it

    ours, theirs = checkpoints(one)[-1], checkpoints(other)[-1]
    if ours.name != theirs.name:
        return [f"{ours.name} and {theirs.name}"]
    mine, its = (json.loads((folder / "trainer_state.json").read_text()) for folder in (ours, theirs))
    found = [name for name in STATE_FIGURES if mine.get(name) != its.get(name)]
    for path in sorted(theirs.glob("rng_state*.pth")):
        states = [torch.load(folder / path.name, weights_only=False) for folder in (ours, theirs)]
        found += [] if _plain(states[0]) == _plain(states[1]) else [path.name]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def compare(one: Path, other: Path, saved: bool) -> dict[str, Any]:
    weights, rows = different_weights(one, other), different_rows(one, other)
    states = different_states(one, other) if saved else []
    return {"equal": not (weights or rows or states), "weights": len(weights), "rows": rows[:6], "states": states}


def measure(name: str, cuts: list[int], home: Path, done: set[tuple[str, Any]], out: Path) -> None:
    """Measure each launch that has no row yet."""
    run, uncut = RUNS[name], home / name / "uncut"
    wanted: list[Any] = [cut for cut in ["none", *cuts] if (name, cut) not in done]
    if not wanted:
        return
    uncut.parent.mkdir()
    every = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": STEPS}
    if problem := launch(run, uncut, home / "cache", **every):
        note(out, {"run": name, "cut": "uncut", "error": problem})
        return
    for cut in wanted:
        began, folder = time.time(), home / name / f"cut{cut}"
        if cut == "none":  # a second uninterrupted launch, which never saves
            problem = launch(run, folder, home / "cache", save_strategy="no")
        else:
            cut_off(uncut, cut, folder)
            problem = launch(run, folder, home / "cache", resume="auto", **every)
        found = {"equal": False, "error": problem} if problem else compare(folder, uncut, saved=cut != "none")
        note(out, {"run": name, "cut": cut, **found, "seconds": round(time.time() - began, 1)})
        if found["equal"]:
            shutil.rmtree(folder)
    shutil.rmtree(home / name, ignore_errors=True)


def note(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps({**row, "versions": versions()}) + "\n")
    print(f"{row['run']:22} {row['cut']!s:>6}  {'bit-identical' if row.get('equal') else json.dumps(row)}", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: for each run, how many cuts are bit-identical."""
    latest = {(row["run"], row["cut"]): row for row in rows if "error" not in row or row["cut"] != "uncut"}
    lines = ["| run | recipe | ranks | two uninterrupted launches | bit-identical cuts | other cuts, by step |"]
    lines.append("|---|---|---|---|---|---|")
    for name, run in RUNS.items():
        mine = {cut: row for (of, cut), row in latest.items() if of == name}
        cuts = {cut: row for cut, row in mine.items() if cut != "none"}
        if not mine:
            continue
        again = "equal" if mine.get("none", {}).get("equal") else "not run" if "none" not in mine else "differ"
        bad = ", ".join(str(cut) for cut, row in sorted(cuts.items()) if not row["equal"]) or "-"
        good = sum(row["equal"] for row in cuts.values())
        lines.append(f"| {name} | {run.recipe} | {run.ranks} | {again} | {good} of {len(cuts)} | {bad} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--cuts", nargs="+", type=int, default=list(CUTS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--anew", action="store_true", help="discard the earlier rows")
    parser.add_argument("--keep", type=Path, help="an empty folder in which to keep the runs")
    options = parser.parse_args()
    if options.anew:
        options.out.unlink(missing_ok=True)
    done = {(row["run"], row["cut"]) for row in rows_of(options.out)}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.runs:
            measure(name, options.cuts, options.keep or Path(folder), done, options.out)
    print(table(list(rows_of(options.out))))


if __name__ == "__main__":
    main()
