r"""Resuming with another number of ranks, ZeRO stage or engine: how far losses and gradient norms are from those of the
uninterrupted run, what the move costs, and what the stock Trainer and DeepSpeed do in the same situation.

    python benchmarks/reshard.py --folder runs/reshard
    python benchmarks/reshard.py --folder runs/reshard --parts uncut one      # some parts; keeps existing runs

No part takes more than four minutes on two cores. Writes docs/results/reshard.json; benchmarks/pages.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from durability_runs import environment, port
from releases import in_words, versions

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))
from warm_ranks import WarmRanks  # noqa: E402  (the ranks of the tests, which have imported the stack already)

SECONDS = 200.0  # time limit of a run
OUT = REPO / "docs" / "results" / "reshard.json"
FIRST, SECOND, LAST = 6, 12, 18  # steps: two checkpoints, and the end
GLOBAL_BATCH, MICRO_BATCH = 16, 2
SHAPE = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,max_position_embeddings=64"
LARGE = "num_hidden_layers=8,hidden_size=640,num_attention_heads=8,max_position_embeddings=64"
TINY = {
    "config_overrides": SHAPE,
    "max_steps": LAST,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": FIRST,
    "save_total_limit": 10,
    "do_eval": False,
    "bf16": False,
    "learning_rate": 3e-3,  # at a higher rate, rounding alone makes runs diverge
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "sample_tokens": 0,
    "max_train_samples": 60,
    "per_device_train_batch_size": MICRO_BATCH,
}
ENGINES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "none", "fsdp", "pipe2")
HALF = ("zero0", "zero2", "zero3", "none")
WORDS = {"none": "no DeepSpeed", "fsdp": "FSDP", "pipe1": "pipeline, 1 stage", "pipe2": "pipeline, 2 stages"}
# For each move: the source's ranks and engine, the ranks and engine that resume, and the precision.
ONE = [(2, of, 1, to, "fp32") for of in ENGINES for to in ("zero0", "zero1", "zero3", "none")] + [
    *((2, of, 1, "zero2_offload", "fp32") for of in ("zero2", "zero3_offload", "none")),
    *((2, of, 1, "pipe1", "fp32") for of in ("zero2", "zero3", "none", "pipe2")),
]
TWO = [
    *((2, of, 2, to, "fp32") for of, to in (("zero1", "zero3"), ("zero3", "zero1"), ("zero2", "zero3"))),
    *((2, of, 2, to, "fp32") for of, to in (("none", "zero3"), ("zero3", "none"), ("pipe2", "zero2"))),
    *((2, of, 2, "fsdp", "fp32") for of in ("zero3", "none", "pipe2")),
    (2, "zero2", 2, "zero2_offload", "fp32"),
    *((1, of, 2, to, "fp32") for of, to in (("zero1", "zero1"), ("zero3", "zero3"), ("zero3", "zero2"))),
    *((2, of, 2, to, "bf16") for of in HALF for to in HALF if of != to),
    (2, "zero2", 2, "pipe2", "fp32"),  # last, because a pipeline leaves its grid behind in DeepSpeed
]
FOUR = [(1, "zero1", 4, to, "fp32") for to in ("zero1", "zero2", "zero3", "none", "pipe2")]
STOCK_ABOUT = """
The same moves with a two-layer GPT-2 and the stock stack (`benchmarks/stock_reshard.py`): resumed directly, and through
`deepspeed.checkpoint.ds_to_universal` and `load_universal`.
"""
UNMOVED = "as it stands"  # the seconds, in the data, of a checkpoint that the engine loads itself
STOCK = [(1, 1), (1, 2), (1, 3), (3, 1), (3, 2), (3, 3)]  # ZeRO stages


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def name_of(ranks: int, engine: str, precision: str) -> str:
    return f"{engine}-{ranks}-{precision}"


def words(folder: Path, ranks: int, engine: str, precision: str, more: dict[str, Any]) -> list[str]:
    """The recipe and its flags. A resumed run leaves the accumulation to the toolkit."""
    stages = int(engine.removeprefix("pipe")) if engine.startswith("pipe") else 0
    values = {**TINY, "output_dir": folder, "bf16": precision == "bf16"}
    if stages or engine == "fsdp":
        values |= {"pipeline_parallel_size": stages} if stages else {"fsdp": True}
    else:
        values["deepspeed"] = engine
    if "resume" not in more:
        values["gradient_accumulation_steps"] = GLOBAL_BATCH * max(1, stages) // (MICRO_BATCH * ranks)
    flags = [word for key, value in (values | more).items() for word in (f"--{key}", str(value))]
    return [f"recipes/causal_lm{'_pipeline' if stages else ''}.py", *flags]


def torchrun(ranks: int, *command: str) -> str:
    """Run a command under torchrun; what it printed."""
    start = [tool("torchrun"), "--nproc_per_node", str(ranks), "--master_port", port()]
    done = subprocess.run(
        [*start, *command], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout


def launch(ranks: int, runs: list[list[str]]) -> None:
    """Launch each run on ranks that have already imported the stack; its output is in a log beside its folder."""
    warm = WarmRanks()
    for words_of in runs:
        folder = Path(words_of[words_of.index("--output_dir") + 1])
        start = [tool("torchrun"), "--nproc_per_node", str(ranks), "--master_port", port()]
        _, said = warm.run(start, words_of, ranks, environment(folder.parent / "cache"), SECONDS)
        folder.with_suffix(".log").write_text(said, encoding="utf-8")
    warm.close()


def uncut(folder: Path) -> None:
    """The uninterrupted runs: those on two ranks, and those on one."""
    wanted = [(2, engine, "bf16") for engine in HALF] + [(2, engine, "fp32") for engine in ENGINES]  # the pipeline last
    for ranks in (2, 1):
        some = [run for run in [*wanted, (1, "zero1", "fp32"), (1, "zero2", "bf16")] if run[0] == ranks]
        left = [run for run in some if not (folder / name_of(*run) / "README.md").is_file()]
        for run in left:
            shutil.rmtree(folder / name_of(*run), ignore_errors=True)
        launch(ranks, [words(folder / name_of(*run), *run, {}) for run in left])


def place_of(folder: Path, move: tuple[Any, ...]) -> Path:
    ranks, engine, to_ranks, to_engine, precision = move
    return folder / f"{name_of(ranks, engine, precision)}-to-{to_engine}-{to_ranks}"


def source_of(folder: Path, move: tuple[Any, ...]) -> tuple[Path, int]:
    """The checkpoint that a move resumes from. One-rank checkpoints come from two ranks: 2 -> 1 -> 2."""
    ranks, engine, to_ranks, _, precision = move
    if ranks == 1 and to_ranks == 2:
        back = place_of(folder, (2, "zero3" if engine == "zero3" else "zero2", 1, engine, precision))
        return back / f"checkpoint-{SECOND}", SECOND
    return folder / name_of(ranks, engine, precision) / f"checkpoint-{FIRST}", FIRST


def moves(folder: Path, some: list[tuple[Any, ...]]) -> None:
    left = [move for move in some if not (place_of(folder, move) / "README.md").is_file()]
    runs = []
    for move in left:
        shutil.rmtree(place_of(folder, move), ignore_errors=True)
        runs.append(words(place_of(folder, move), move[2], move[3], move[4], {"resume": source_of(folder, move)[0]}))
    launch(some[0][2], runs)


def steps_of(folder: Path) -> dict[int, dict[str, float]]:
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.is_file() else []
    return {row["step"]: row for row in rows if "loss" in row}


def apart(found: dict[int, dict[str, float]], truth: dict[int, dict[str, float]], after: int) -> tuple[float, float]:
    """The largest relative deviation of loss and of gradient norm after a step."""
    steps = [step for step in found if step > after]
    loss, norm = (max(abs(found[s][key] / truth[s][key] - 1) for s in steps) for key in ("loss", "grad_norm"))
    return loss, norm


def stock(folder: Path) -> None:
    """The plain Trainer and DeepSpeed: resume directly, then through DeepSpeed's universal checkpoint."""
    script = "benchmarks/stock_reshard.py"
    sources = [{"folder": str(folder / f"stock-{stage}"), "stage": stage} for stage in (1, 3)]
    lines = torchrun(2, script, json.dumps(sources)).splitlines()
    found = [line for line in lines if line.startswith('{"folder"')]
    for stage in (1, 3):
        place = folder / f"stock-{stage}" / "checkpoint-4"
        options = ["--output_folder", "global_step4_universal", "--inject_missing_state", "--num_extract_workers", "1"]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", "global_step4"]
        subprocess.run([*command, *options], cwd=place, capture_output=True, check=True)
    for ranks in (1, 2):
        runs = [
            {"folder": str(folder / "stock-on"), "stage": to, "resume": place, "universal": universal}
            for of, to in STOCK
            for place in [str(folder / f"stock-{of}" / "checkpoint-4")]
            for universal in (False, True)
        ]
        lines = torchrun(ranks, script, json.dumps(runs)).splitlines()
        found += [json.dumps({**json.loads(line), "ranks": ranks}) for line in lines if line.startswith('{"folder"')]
    (folder / "stock.jsonl").write_text("\n".join(found) + "\n", encoding="utf-8")


READ = """
import sys, resource, time
from pathlib import Path
from finetune.training.reshard.one_file import Names
from finetune.training.reshard.portable import WEIGHT
from finetune.training.reshard.reading import read_any
from finetune.training.reshard.sharding import sharding_of
place = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.monotonic()
portable = read_any(place, sharding_of(place), Names((), {}))
for name in portable.shapes:
    for key in (WEIGHT, *portable.keys):
        portable.read(name, key)
print("figures", time.monotonic() - start, portable.bytes, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def size(folder: Path) -> None:
    """Seconds and memory of reading a larger model by name, and those of DeepSpeed's converter."""
    place = folder / "large" / "checkpoint-1"
    if not place.is_dir():
        more = {"config_overrides": LARGE, "max_steps": 1, "save_steps": 1, "gradient_accumulation_steps": 1}
        launch(2, [words(folder / "large", 2, "zero3", "fp32", more)])
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", READ, str(place)]
    done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, check=True)
    figures = re.findall(r"^figures (.*)$", done.stdout, re.MULTILINE)[0].split()
    ours = {"seconds": float(figures[0]), "bytes": int(figures[1]), "mib_before": int(figures[2]) / 1024}
    ours["mib_peak"] = int(figures[3]) / 1024
    start = time.monotonic()
    target = folder / "large" / "global_step1_universal"
    shutil.rmtree(target, ignore_errors=True)
    arguments = ["--input_folder", str(place / "global_step1"), "--output_folder", str(target)]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    module = "deepspeed.checkpoint.ds_to_universal"
    subprocess.run([sys.executable, "-m", module, *arguments, *workers], env=env, capture_output=True, check=True)
    theirs = {"seconds": time.monotonic() - start}
    theirs["mib_peak"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    (folder / "size.json").write_text(json.dumps({"ours": ours, "theirs": theirs}, indent=2) + "\n", encoding="utf-8")


def cost_of(place: Path) -> str:
    """The seconds of a move, from the run's log."""
    log = place.with_suffix(".log")
    found = re.search(r"resume: moved in ([\d.]+) s", log.read_text(encoding="utf-8")) if log.is_file() else None
    return found[1] if found else UNMOVED


def rows(folder: Path, some: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    made = []
    for move in some:
        ranks, engine, to_ranks, to_engine, precision = move
        place, (_, after) = place_of(folder, move), source_of(folder, move)
        truth = steps_of(folder / name_of(1 if to_ranks == 4 else 2, engine, precision))
        of, to = (f"{n} x {WORDS.get(e, e)}" for n, e in ((ranks, engine), (to_ranks, to_engine)))
        found = steps_of(place)
        apart_by = apart(found, truth, after) if found and truth else None
        row = {"of": of, "to": to, "precision": precision, "apart": apart_by, "seconds": cost_of(place)}
        made.append(row)
    return made


def stock_rows(folder: Path) -> list[dict[str, str]]:
    every = [json.loads(line) for line in (folder / "stock.jsonl").read_text(encoding="utf-8").splitlines()]
    truth = {run["stage"]: {row["step"]: row for row in run["steps"]} for run in every if "resume" not in run}

    def said(run: dict[str, Any], of: int) -> str:
        if "error" in run:
            return str(run["error"]).replace("|", "/")[:90]
        loss, norm = apart({row["step"]: row for row in run["steps"]}, truth[of], 4)
        return f"loss {loss:.0e}, norm {norm:.0e}"

    made = []
    for ranks in (1, 2):
        for of, to in STOCK:
            mine = [
                r
                for r in every
                if r.get("ranks") == ranks and r["stage"] == to and f"stock-{of}/" in r.get("resume", "")
            ]
            by = {run["universal"]: said(run, of) for run in mine}
            row = {"of": f"2 x ZeRO-{of}", "to": f"{ranks} x ZeRO-{to}", "as_it_stands": by.get(False, "crashed")}
            made.append(row | {"universal": by.get(True, "crashed")})
    return made


def noise(folder: Path) -> dict[str, tuple[float, float]]:
    """The differences between uninterrupted runs of different layouts."""
    found = {}
    for precision, engines in (("fp32", ENGINES), ("bf16", HALF)):
        truth = steps_of(folder / name_of(2, "zero2", precision))
        some = [apart(steps_of(folder / name_of(2, engine, precision)), truth, FIRST) for engine in engines]
        found[precision] = (max(loss for loss, _ in some), max(norm for _, norm in some))
    return found


def figures(folder: Path) -> dict[str, Any]:
    """All figures of the page, from a folder of runs."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "noise": noise(folder),
        "moves": rows(
            folder, [move for move in ONE + TWO + FOUR if place_of(folder, move).with_suffix(".log").is_file()]
        ),
    }
    if (folder / "stock.jsonl").is_file():
        found["stock"] = stock_rows(folder)
    if (folder / "size.json").is_file():
        found["size"] = json.loads((folder / "size.json").read_text(encoding="utf-8"))
    return found


def page(found: dict[str, Any]) -> str:
    noises = (f"{name}: loss {loss:.1e}, gradient norm {norm:.1e}" for name, (loss, norm) in found["noise"].items())
    stack = in_words(found["versions"])
    about = f"""
`python benchmarks/reshard.py`, {found["date"]}, {stack}: a two-layer GPT-lite, global batch {GLOBAL_BATCH},
weight decay 0.1 on everything but biases and norms, on CPU ranks over gloo, one run each. The run is interrupted at
step {FIRST} (2 -> 1 -> 2: again at {SECOND}) and resumes in another layout until step {LAST}. Deviations in loss and
gradient norm are relative to the uninterrupted run, the largest of all later steps.

Uninterrupted runs in other layouts also deviate from the one under ZeRO-2, because of the order of additions and of
bf16 rounding: {"; ".join(noises)}.
"""
    lines = [
        "# Resuming in another layout: measurements",
        about,
        "Layouts are given as ranks x engine. What the engine loads itself is not moved.",
        "",
        "| written by | resumed by | precision | deviation in loss | deviation in gradient norm | seconds to load |",
        "|---|---|---|---|---|---|",
    ]
    for move in found["moves"]:
        seconds = "by the engine" if move["seconds"] == UNMOVED else move["seconds"]
        deviations = "failed | " if move["apart"] is None else "{:.1e} | {:.1e}".format(*move["apart"])
        lines.append(f"| {move['of']} | {move['to']} | {move['precision']} | {deviations} | {seconds} |")
    if "stock" in found:
        lines += [
            "\n## The stock Trainer and DeepSpeed",
            STOCK_ABOUT,
            "| written by | resumed by | directly | through a universal checkpoint |",
        ]
        lines += ["|---|---|---|---|", *(f"| {' | '.join(row.values())} |" for row in found["stock"])]
    if "size" in found:
        lines += ["\n## Cost of a larger move", size_about(**found["size"])]
    return "\n".join(lines).rstrip() + "\n"


def size_about(ours: dict[str, float], theirs: dict[str, float]) -> str:
    more = ours["mib_peak"] - ours["mib_before"]
    return f"""
To read {ours["bytes"] / 2**20:,.0f} MiB of weights and states by name (ZeRO-3 on two ranks) took one process
{ours["seconds"]:.1f} s, and {more:,.0f} MiB of memory above the {ours["mib_before"]:,.0f} MiB of the imports, including
mapped files. `ds_to_universal`, which writes them anew, took {theirs["seconds"]:.1f} s with one worker, including
imports, and {theirs["mib_peak"]:,.0f} MiB.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/reshard"))
    parts = ("uncut", "one", "two", "four", "stock", "size")
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    do = {
        "uncut": lambda: uncut(folder),
        "one": lambda: moves(folder, ONE),
        "two": lambda: moves(folder, TWO),
        "four": lambda: moves(folder, FOUR),
        "stock": lambda: stock(folder),
        "size": lambda: size(folder),
    }
    for part in given.parts:
        do[part]()
    OUT.write_text(json.dumps(figures(folder), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
