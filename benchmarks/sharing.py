"""What sequence_parallel.py and expert_parallel.py have in common: launches by processes that have imported the stack,
steps timed by turns, and results written part by part."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from releases import versions

ROUNDS, WARM_STEPS, TIMED_STEPS = 5, 2, 4


def write_parts(out: Path, parts: Mapping[str, Callable[[], Iterator[dict[str, Any]]]], is_whole: bool) -> None:
    """Measure these parts, and write each row at once beside what `out` has of the others. The date is that of the last
    run of all parts; rows of "times" have their own."""
    found: dict[str, Any] = {} if is_whole or not out.is_file() else json.loads(out.read_text())
    found = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), **found}
    for name, rows in parts.items():
        found[name] = []
        for row in rows():
            found[name].append(row)
            out.write_text(json.dumps(found, indent=1) + "\n")


def launched(warm: Any, ranks: int, script: list[Any], values: dict[str, Any]) -> None:
    """Run `script` with these flags. Ends the benchmark with its output if it fails."""
    from conftest import LAUNCHERS, flags

    words = [*map(str, script), *flags(values)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    status, output = warm.run(LAUNCHERS["torchrun" if ranks > 1 else "python"](ranks), words, ranks, environment, 600)
    if status:
        raise SystemExit(output[-3000:])


def run_of(home: Path, warm: Any, every: Mapping[str, Any], ranks: int, **values: Any) -> tuple[list[Any], Any]:
    """The logged rows of recipes/causal_lm.py with a loss, and the final weights."""
    from safetensors.torch import load_file

    folder = Path(tempfile.mkdtemp(dir=home))
    launched(warm, ranks, ["recipes/causal_lm.py"], {**every, "output_dir": folder / "run", **values})
    log = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [row for row in log if "loss" in row], load_file(folder / "run/model.safetensors")


def by_turns(home: Path, every: Mapping[str, Any], layouts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The median seconds of a step in each of ROUNDS launches of each layout on two ranks, in turns, and the date."""
    from warm_ranks import WarmRanks

    warm, found = WarmRanks(), {name: list[float]() for name in layouts}
    for turn in range(ROUNDS):
        for name in list(layouts)[:: -1 if turn % 2 else 1]:
            rows, _ = run_of(home, warm, every, 2, **layouts[name])
            found[name].append(round(statistics.median(row["step_seconds"] for row in rows[WARM_STEPS:]), 4))
        print({name: seconds[-1] for name, seconds in found.items()}, flush=True)
    warm.close()
    return {**found, "date": time.strftime("%Y-%m-%d")}


def ratio(row: Mapping[str, Any], name: str, other: str) -> str:
    """Of seconds: the median over rounds, and the range."""
    each = [one / of for one, of in zip(row[name], row[other], strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
