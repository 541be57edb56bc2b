"""Runs all measurements on one GPU, the most important first. A new start skips the parts that are done.

    python benchmarks/gpu.py                      # stops before 25 minutes are over
    python benchmarks/gpu.py --minutes 9          # for machines with a time limit per command: a few parts per start
    python benchmarks/gpu.py --again lora zero    # runs these parts again, for example because they failed
    python benchmarks/gpu.py --list               # lists the parts; needs no GPU
    python benchmarks/gpu.py --out gpu_results    # writes there instead of docs/results

Each part is a process with its own time limit. After each, gpu.json records how it ended, with which releases, and
after how many seconds; gpu.md is rendered from that. A part that fails or times out does not stop the others. Nothing
is downloaded. Besides the recipes' packages, `lora` needs trl and peft, and `kernels` needs liger-kernel. `lora` writes
16 GB of temporary files.

On a borrowed machine, bring the folder of --out along, and copy it back after each command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RequestError
from finetune.host.hardware import driver_version, gpu_names
from finetune.measure.outcome import CRASHED, DONE, Outcome
from finetune.measure.processes import run
from finetune.privacy import without_home
from finetune.versions import version

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "docs" / "results"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "liger-kernel", "triton")
SAID_LINES = {True: 12, False: 30}  # lines kept of a part's output: done or not
OUT, MACHINE = "OUT", "OUT/gpu_machine.json"  # OUT: the folder of results, in a part's command
PLAN = ("-m", "finetune.cli", "plan")


@dataclass(frozen=True)
class Part:
    """`command` has Python's arguments; `files` are those that it must write below OUT, its own page among them if
    it has one. Without files, the page shows its output."""

    name: str
    what: str
    command: tuple[str, ...]
    minutes: float  # its time limit
    files: tuple[str, ...] = ()


def results(name: str) -> tuple[str, ...]:
    return f"{name}.json", f"{name}.md"


PARTS = (
    Part("calibrate", "This GPU's profile for `finetune plan`: rates of products and memory, the link to the host.",
         (*PLAN, "--calibrate", MACHINE, "--ranks", "1"), 5, ("gpu_machine.json",)),
    Part("plan", "Memory and step times of many runs; plan_gpu.py --compare plans the same.",
         ("benchmarks/plan_gpu.py", "--measure", "OUT/plan_gpu"), 8, ("plan_gpu/facts.json",)),
    Part("gpt2", "GPT-2 124M: the recipe, the stock Trainer and a compiled plain loop, tokens/s and MFU.",
         ("benchmarks/causal_lm_gpu.py", "--parts", "training", "--repeats", "1", "--out", OUT), 8,
         results("causal_lm_gpu")),
    Part("distilbert", "A DistilBERT on texts of IMDB's lengths: the recipe and the stock Trainer.",
         ("benchmarks/seq_cls.py", "--ranks", "1", "--model", "distilbert", "--data", "IMDB-like lengths",
          "--parts", "speed", "--windows", "40", "--repeats", "1", "--out", OUT), 6, results("seq_cls_gpu")),
    Part("lora", "LoRA of an 8B Llama (random weights), bf16, blocks of 2,048 tokens: the recipe and TRL.",
         ("benchmarks/post_training.py", "--shape", "8b", "--kinds", "lora", "--bf16", "--batch", "1",
          "--block_size", "2048", "--repeats", "1", "--out", "OUT/post_training_gpu.json"), 7,
         results("post_training_gpu")),
    Part("chunked_loss", "Chunked head and loss, and activation checkpointing: time, memory, accuracy.",
         ("benchmarks/causal_lm_gpu.py", "--parts", "cross_entropy", "checkpointing", "--repeats", "1", "--out", OUT),
         4, results("causal_lm_gpu")),
    Part("one_stage", "The pipeline engine with one stage, compared with the Trainer.",
         ("benchmarks/pipeline.py", "--gpu", "--out", OUT), 5, results("pipeline_gpu")),
    Part("zero", "ZeRO-0 to 3 on one rank, compared with the plain Trainer.",
         ("benchmarks/zero_speed.py", "--gpu", "--parts", "shipped", "--models", "gptlite_study", "--rounds", "7",
          "--steps", "5", "--out", OUT), 4, results("zero_speed_gpu")),
    Part("async_save", "How long a save stalls training, and how fast states are copied from the GPU.",
         ("benchmarks/async_save.py", "--gpu", "--sizes", "12x768", "24x1024", "--out", "OUT/async_save_gpu.json"), 3,
         results("async_save_gpu")),
    Part("kernels", "Losses and gradient norms of each attention and of Liger's kernels against eager attention.",
         ("benchmarks/kernel_losses.py", "--out", "OUT/kernel_losses_gpu.json"), 4, results("kernel_losses_gpu")),
    Part("long_context", "Long texts: chunked loss, activation checkpoints, tiles, host memory; and the longest block.",
         ("benchmarks/long_context_gpu.py", "--machine", MACHINE, "--out", OUT), 9, results("long_context_gpu")),
)  # fmt: skip


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """The exit status. 0: all parts that ran are done; 1: a part failed or timed out; 2: there is no GPU."""
    names = [part.name for part in parts]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="starts no part that might end later (default: 25)")
    parser.add_argument("--again", nargs="+", default=[], choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="print the parts and their status, and run none")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: docs/results)")
    asked = parser.parse_args(argv)
    out = asked.out.resolve()
    if asked.list:
        ended = recorded(out)
        for part in parts:
            status = ended.get(part.name, {}).get("status", "to do")
            print(f"{part.name:14}{status:12}{part.minutes:3.0f} min  {part.what}\n{'':14}{in_words(part)}")
        return 0
    if not gpu_names():
        raise RequestError("nvidia-smi lists no GPU, but this benchmark needs one. --list shows what it would run.")
    out.mkdir(parents=True, exist_ok=True)
    write(out, {name: row for name, row in recorded(out).items() if name not in asked.again}, parts)
    return run_all(parts, out, asked.minutes)


def run_all(parts: Sequence[Part], out: Path, minutes: float) -> int:
    os.chdir(REPO)  # the scripts' paths are relative to it
    os.environ["HF_HUB_OFFLINE"] = "1"
    begun, has_failed = time.monotonic(), False
    for part in [part for part in parts if part.name not in recorded(out)]:
        left = minutes - (time.monotonic() - begun) / 60
        if part.minutes > left:
            print(f"{part.name}: left for another start; it may take {part.minutes:.0f} minutes, {left:.1f} are left")
            continue
        print(f"{part.name}: {in_words(part)}", flush=True)
        row = measured(part, out)
        print(f"{part.name}: {row['status']} after {row['seconds']:.0f} s. {row['reason'] or ''}", flush=True)
        write(out, {**recorded(out), part.name: row}, parts)
        has_failed |= row["status"] != DONE
    return int(has_failed)


def measured(part: Part, out: Path) -> dict[str, object]:
    """Run a part as a process; the record has no paths of this machine."""
    started, begun = time.time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        place = str(out.relative_to(REPO) if out.is_relative_to(REPO) else out)  # pages show it
        words = [word.replace(OUT, place) for word in part.command]
        ended = run([sys.executable, *words], log, part.minutes * 60)
        text = log.read_bytes().decode(
            errors="replace"
        )  # keeps carriage returns, so that overwritten text can be dropped
    seconds = time.monotonic() - begun
    old = [name for name in part.files if not (out / name).is_file() or (out / name).stat().st_mtime < started]
    if ended.kind == DONE and old:
        ended = Outcome(CRASHED, f"it succeeded, but did not write {', '.join(old)}")
    is_done = ended.kind == DONE
    lines = [said for line in text.split("\n") if (said := plain(line, out))]
    return {
        "command": in_words(part), "status": ended.kind, "reason": plain(ended.reason or "", out) or None,
        "seconds": round(seconds, 1), "gpu": next(iter(gpu_names()), None), "driver": driver_version(),
        "said": [] if is_done and part.files else lines[-SAID_LINES[is_done] :],
        "versions": {name: found for name in PACKAGES if (found := version(name))},
        "date": time.strftime("%Y-%m-%d"), "what": part.what, "files": part.files,
    }  # fmt: skip


def in_words(part: Part) -> str:
    return shlex.join(["python", *part.command])


def plain(line: str, out: Path) -> str:
    """A line without colors, progress bars and this machine's folders."""
    line = re.sub(r"\x1b\[[\d;]*m", "", line.rsplit("\r", 1)[-1].rstrip())
    for path, name in ((str(out), OUT), (str(REPO), "."), (sys.prefix, "PYTHON")):
        line = line.replace(path, name)
    return without_home(line)[:200]


def recorded(out: Path) -> dict[str, dict]:
    path = out / "gpu.json"
    return json.loads(path.read_text(encoding="utf-8"))["parts"] if path.is_file() else {}


def write(out: Path, rows: Mapping[str, Mapping[str, object]], parts: Sequence[Part]) -> None:
    """Write gpu.json, atomically and in the order of the parts, and its page."""
    known = {"parts": {part.name: rows[part.name] for part in parts if part.name in rows}}
    for name, text in (("gpu.json", json.dumps(known, indent=1) + "\n"), ("gpu.md", page(known))):
        (out / f"{name}.new").write_text(text, encoding="utf-8")
        os.replace(out / f"{name}.new", out / name)


def page(record: Mapping[str, Mapping[str, dict]]) -> str:
    """docs/results/gpu.md: the status of each part, and the output of parts without their own page."""
    rows = record["parts"]
    lines = ["# Measurements on one GPU", "", "Made by `python benchmarks/gpu.py`. OUT is the folder of this page.", ""]
    lines += ["| part | measures | status | seconds | page |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        pages = [f"[{Path(file).stem}]({file})" for file in row["files"] if file.endswith(".md")]
        where = ", ".join(pages) if row["status"] == DONE else ""
        lines.append(f"| {name} | {row['what']} | {row['status']} | {row['seconds']:.0f} | {where or '-'} |")
    for name, row in rows.items():
        versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
        lines += ["", f"## {name}", "", f"`{row['command']}`", ""]
        lines += [f"{row['gpu']}, driver {row['driver']}; {versions}; {row['date']}."]
        lines += ["", f"Status `{row['status']}`: {row['reason']}"] if row["reason"] else []
        lines += ["", "```", *row["said"], "```"] if row["said"] else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RequestError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
