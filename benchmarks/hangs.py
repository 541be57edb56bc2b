r"""How soon does a hanging rank end the run with --hang_blame True, and does a message name it?

    python benchmarks/hangs.py                       # three layouts, about ten minutes; mostly waiting

Once the run trains, one of two ranks is stopped (SIGSTOP), or never gets its next batch (tests/runs/faulty.py). The
seconds are measured from then until no process of the run is left. Writes a row for each to docs/results/hangs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from durability_runs import REPO, RUNS, rows_of
from killing import LATEST_END_SECONDS, Launch, new_steps
from releases import versions

OUT = REPO / "docs" / "results" / "hangs.jsonl"
LAYOUTS, FAULTS, CULPRIT = ("ddp", "zero2", "pipeline"), ("stopped", "stuck"), 1
STUCK_AT = 40  # batches of the culprit
START_SECONDS = 120
FLAGS = {"max_steps": 100_000, "save_strategy": "no", "eval_strategy": "no", "hang_blame": True}
FLAGS |= {"metric_for_best_model": None, "early_stopping_patience": None}


def measure(name: str, fault: str, home: Path) -> dict[str, Any]:
    run, folder = RUNS[name], home / f"{name}-{fault}"
    command = run.command(folder, **FLAGS)
    if fault == "stuck":
        at = next(i for i, word in enumerate(command) if word.startswith("recipes/"))
        command.insert(at, "tests/runs/faulty.py")
        os.environ["FAULT"] = json.dumps({"kind": "sleep", "rank": CULPRIT, "batch": STUCK_AT})
    launch = Launch(command, folder, home / "cache", run.ranks)
    late = time.time() + START_SECONDS
    while len(new_steps(folder, launch.began)) < 3 and time.time() < late:
        time.sleep(0.05)
    if launch.has_ended():
        raise SystemExit(launch.output[-3000:])
    if fault == "stopped":
        launch.ranks()[CULPRIT].send_signal(signal.SIGSTOP)
        began = time.time()
    else:
        while (last := new_steps(folder, launch.began)[-1][0]) > time.time() - 3:  # no step for 3 s: it is stuck
            time.sleep(0.05)
        began = last
    ended = launch.end(2 * LATEST_END_SECONDS)
    said = re.findall(r"^error: (.*)", launch.output, re.MULTILINE)
    row = {"run": name, "fault": fault, "ended": ended is not None, "seconds": round(time.time() - began, 1)}
    return {**row, "named": len(said) == 1 and f"rank {CULPRIT}" in said[0], "said": said, "versions": versions()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    done = {(row["run"], row["fault"]) for row in rows_of(options.out)}
    with tempfile.TemporaryDirectory() as home:
        for name in options.runs:
            for fault in FAULTS:
                if (name, fault) in done:
                    continue
                row = measure(name, fault, Path(home))
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    found = list(rows_of(options.out))
    return 0 if all(row["named"] and row["seconds"] <= 60 for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
