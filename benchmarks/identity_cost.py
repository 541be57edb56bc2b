"""The cost of the run identity in a checkpoint: at a start, at a resumed start, and at a save. Writes
docs/results/identity_cost.json and identity_cost.md.

    python benchmarks/identity_cost.py               # about six minutes on two cores
    python benchmarks/identity_cost.py --repeats 9

Each recipe runs for two steps, saves, and resumes for one more, in one process each. In these processes, each function
of the identity is called --repeats times instead of once. Wall-clock and CPU time are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from durability_runs import REPO, environment
from releases import in_words, this_machine, versions

OUT = REPO / "docs" / "results" / "identity_cost.json"
TIMINGS, REPEATS = (
    "IDENTITY_TIMINGS",
    "IDENTITY_REPEATS",
)  # environment variables of a run: the file for the times, and the number of calls
EVERY = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "do_eval": False, "bf16": False}
EVERY |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
ROWS, WORDS = 200_000, 20  # rows of the table, and words per row
SMALL = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,max_position_embeddings=32"
LM = {"config_overrides": SMALL, "sample_tokens": 0, "tokenizer": "byte"}
TABLE = "table.csv"  # written for this benchmark
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "built-in texts": ("seq_cls", {}),
    "a table of {rows:,} texts": ("seq_cls", {"train_file": TABLE, "max_seq_length": 32}),
    "built-in manual, as tokens": ("causal_lm", LM),
    "the table, as tokens": ("causal_lm", {**LM, "train_file": TABLE, "text_column_name": "text"}),
    "the table, streamed": ("causal_lm", {**LM, "train_file": TABLE, "text_column_name": "text", "streaming": True}),
    "digits": ("image_cls", {}),
}
PARTS = {
    "anew": "start: compute hashes",
    "kept": "start: cached hashes",
    "flags": "resume: compare flags",
    "rows": "resume: compare rows and model",
    "mixed": "resume: check that files are of one step",
    "save": "save",
}
MANY_FILES = 1024


# Inside a run


def in_a_run(script: str, words: list[str]) -> None:
    """Run a recipe and time its functions of the identity."""
    from finetune.data.cache import cache_home
    from finetune.training import chapters, start
    from finetune.training.checkpoints import choice, writing

    times: dict[str, list[tuple[float, float]]] = {}
    resumes = "--resume" in words

    def timed(function: Callable[..., Any], label: str, before: Callable[[], None] = lambda: None) -> Any:
        def call(*given: Any) -> Any:
            for _ in range(int(os.environ[REPEATS])):
                before()
                clock, cpu = time.perf_counter(), time.process_time()
                found = function(*given)
                spent = (time.perf_counter() - clock, time.process_time() - cpu)
                times.setdefault(label, []).append(spent)
            return found

        return call

    def forget() -> None:
        shutil.rmtree(cache_home() / "digests", ignore_errors=True)

    kept = timed(chapters.settle_identity, "rows" if resumes else "kept")
    anew = timed(chapters.settle_identity, "anew", forget)
    chapters.settle_identity = kept if resumes else lambda *given: (anew(*given), kept(*given))[1]
    start.course_of = timed(start.course_of, "flags") if resumes else start.course_of
    choice.mixed = timed(choice.mixed, "mixed")
    writing.write_identity = writing.write_identity if resumes else timed(writing.write_identity, "save")
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    Path(os.environ[TIMINGS]).write_text(json.dumps(times))


# Outside


def write_table(path: Path) -> None:
    generator, words = random.Random(0), [f"w{number}" for number in range(5000)]
    with path.open("w") as file:
        file.write("text,label\n")
        for _ in range(ROWS):
            file.write(f"{' '.join(generator.choices(words, k=WORDS))},{generator.choice(('good', 'bad'))}\n")


def case(name: str, home: Path, repeats: int) -> dict[str, Any]:
    recipe, flags = CASES[name]
    folder, timings = home / "run", home / "timings.json"
    shutil.rmtree(folder, ignore_errors=True)
    env = environment(home / "cache") | {TIMINGS: str(timings), REPEATS: str(repeats), "CUDA_VISIBLE_DEVICES": ""}
    found: dict[str, Any] = {"recipe": recipe}
    for more in ({"max_steps": 2}, {"max_steps": 3, "resume": "auto"}):
        values = {"output_dir": folder, **EVERY, **flags, **more}
        values |= {"train_file": home / TABLE} if "train_file" in values else {}
        words = [word for flag, value in values.items() for word in (f"--{flag}", str(value))]
        command = [sys.executable, __file__, "--inside", f"recipes/{recipe}.py", *words]
        done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
        found |= json.loads(timings.read_text())
    found["data_bytes"] = (home / TABLE).stat().st_size if "train_file" in flags else None
    found["files"] = len(json.loads((folder / "checkpoint-2" / "run.json").read_text())["files"])
    return found


def many_files(home: Path, repeats: int) -> dict[str, Any]:
    """The save of a checkpoint with files of many ranks."""
    from finetune.training.checkpoints.identity import Identity, new_id
    from finetune.training.checkpoints.manifest import FileRecord
    from finetune.training.checkpoints.writing import write_identity

    folder = home / "many"
    folder.mkdir()
    records = {f"global_step2/zero_pp_rank_{at}_optim_states.pt": FileRecord(1, "0" * 32) for at in range(MANY_FILES)}
    times = []
    for _ in range(repeats):
        clock, cpu = time.perf_counter(), time.process_time()
        write_identity(folder, Identity(new_id(), {}, {}, {}, ()).at(2, records))
        times.append((time.perf_counter() - clock, time.process_time() - cpu))
    return {"recipe": None, "data_bytes": None, "files": MANY_FILES, "save": times}


def cell(times: list[list[float]] | None) -> str:
    """Milliseconds of wall-clock time with their range, and of CPU time."""
    if not times:
        return "-"
    clock, cpu = ([1e3 * both[at] for both in times] for at in (0, 1))
    return f"{statistics.median(clock):.1f} ({min(clock):.1f} to {max(clock):.1f}); {statistics.median(cpu):.1f}"


def page(record: dict[str, Any]) -> str:
    lines = [
        "# The cost of the run identity in checkpoints",
        "",
        f"`python benchmarks/identity_cost.py`, {record['machine']}, {in_words(record['versions'])}.",
        "A checkpoint records which run it belongs to; see [checkpoints.md](../checkpoints.md). Each cell has, in ms,",
        f"the median wall-clock time of {record['repeats']} calls, its range, and after the semicolon the median CPU",
        "time. Files were in the page cache. Hashes of rows and files are cached, and computed again if a file has",
        "changed. A save writes `run.json` and flushes it to the disk.",
        "",
        f"| data | recipe | {' | '.join(PARTS.values())} |",
        f"|---|---|{'---|' * len(PARTS)}",
    ]
    for name, row in record["cases"].items():
        words = name.format(rows=record["rows"])
        size = f", {row['data_bytes'] / 2**20:.0f} MiB" if row["data_bytes"] else ""
        cells = " | ".join(cell(row.get(part)) for part in PARTS)
        lines.append(f"| {words}{size} | {row['recipe'] or 'none'} | {cells} |")
    files = sorted({row["files"] for row in record["cases"].values() if row["recipe"]})
    listed = " or ".join([", ".join(map(str, files[:-1])), str(files[-1])][len(files) < 2 :])
    lines += ["", f"A checkpoint listed {listed} files, in the last row {MANY_FILES:,}."]
    first, last = (f"{value:.1f}" for value in record["load"])
    lines += ["", f"The load average was {first} at the start and {last} at the end."]
    lines += [
        "",
        "What this does not show: several ranks, where only rank 0 does this while the others wait; files that must be",
    ]
    lines += ["read from a disk; a disk that many hosts share.", ""]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        return in_a_run(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    record: dict[str, Any] = {
        "machine": this_machine(),
        "versions": versions(),
        "repeats": repeats,
        "rows": ROWS,
        "load": [os.getloadavg()[0]],
    }
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        write_table(home / TABLE)
        record["cases"] = {name: case(name, home, repeats) for name in CASES}
        record["cases"][f"a save of {MANY_FILES:,} files"] = many_files(home, repeats)
    record["load"].append(os.getloadavg()[0])
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    OUT.with_suffix(".md").write_text(page(record))
    print(page(record))
    return None


if __name__ == "__main__":
    main()
