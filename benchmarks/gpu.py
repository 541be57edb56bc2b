"""All that is measured on one GPU, in order of value. Parts that are done are skipped: start it again, and it goes on.

    python benchmarks/gpu.py                      # stops itself before 25 minutes are over
    python benchmarks/gpu.py --minutes 9          # where a command may take no longer: a few parts at each start
    python benchmarks/gpu.py --again lora zero    # these once more, such as parts that failed
    python benchmarks/gpu.py --list               # what there is to do; needs no GPU
    python benchmarks/gpu.py --out gpu_results    # files go there, and not into docs/results

Each part is a process with a time limit of its own. After each, gpu.json says how it ended, with what, and in how many
seconds, and gpu.md is made from that. One that fails, or is late, stops no other. Nothing is downloaded. Beside what
the recipes need it takes trl and peft (`lora`) and liger-kernel (`kernels`). `lora` writes 16 GB of temporary files.

On a machine that is lent for this: bring the folder of --out with you, and take it home after each command.
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
SAID_LINES = {True: 12, False: 30}  # that are kept of what a part says: done or not
OUT, MACHINE = "OUT", "OUT/gpu_machine.json"  # OUT: the folder of results, in a part's command
PLAN = ("-m", "finetune.cli", "plan")
VERIFY = ("--gpu", MACHINE, "--nodes", "1", "--gpus_per_node", "1", "--bf16", "True", "--verify")
LLAMA = ("--per_device_train_batch_size", "4", "--block_size", "2048")


@dataclass(frozen=True)
class Part:
    """`command` is what Python is given; `files` are those that it must write below OUT, with a page of their own each
    where there is one. Where there is none the page shows what it says."""

    name: str
    what: str
    command: tuple[str, ...]
    minutes: float  # after which it is ended
    files: tuple[str, ...] = ()


def results(name: str) -> tuple[str, ...]:
    return f"{name}.json", f"{name}.md"


PARTS = (
    Part("calibrate", "This GPU as `finetune plan` sees it: rates of products, kernels, the host's link.",
         (*PLAN, "--calibrate", MACHINE, "--ranks", "1"), 5, ("gpu_machine.json",)),
    Part("verify_gpt2", "GPT-2, 16 x 1,024 tokens, planned by that profile, and run.",
         (*PLAN, "gpt2", *VERIFY, "--per_device_train_batch_size", "16", "--block_size", "1024"), 2),
    Part("verify_llama", "Llama-3.2-1B under ZeRO-2, 4 x 2,048 tokens, likewise.",
         (*PLAN, "Llama-3.2-1B", *VERIFY, *LLAMA, "--deepspeed", "zero2"), 2),
    Part("gpt2", "GPT-2 124M: the recipe, the stock Trainer and a compiled plain loop, tokens/s and MFU.",
         ("benchmarks/causal_lm_gpu.py", "--parts", "training", "--repeats", "1", "--out", OUT), 8,
         results("causal_lm_gpu")),
    Part("distilbert", "A DistilBERT on texts as long as IMDB's: the recipe and the stock Trainer.",
         ("benchmarks/seq_cls.py", "--ranks", "1", "--model", "distilbert", "--data", "IMDB-like lengths",
          "--parts", "speed", "--windows", "40", "--repeats", "1", "--out", OUT), 6, results("seq_cls_gpu")),
    Part("lora", "LoRA of a Llama of 8B (random weights), bf16, blocks of 2,048 tokens: the recipe and TRL.",
         ("benchmarks/post_training.py", "--shape", "8b", "--kinds", "lora", "--bf16", "--batch", "1",
          "--block_size", "2048", "--repeats", "1", "--out", "OUT/post_training_gpu.json"), 7,
         results("post_training_gpu")),
    Part("chunked_loss", "Head and loss in chunks, and checkpointing of layers: time, memory, exactness.",
         ("benchmarks/causal_lm_gpu.py", "--parts", "cross_entropy", "checkpointing", "--repeats", "1", "--out", OUT),
         4, results("causal_lm_gpu")),
    Part("one_stage", "The pipeline's engine at one stage against the Trainer.",
         ("benchmarks/pipeline.py", "--gpu", "--out", OUT), 5, results("pipeline_gpu")),
    Part("zero", "ZeRO-0 to 3 on one rank against the plain Trainer.",
         ("benchmarks/zero_speed.py", "--gpu", "--parts", "shipped", "--models", "gptlite_study", "--rounds", "7",
          "--steps", "5", "--out", OUT), 4, results("zero_speed_gpu")),
    Part("async_save", "What a save stalls training by, and how fast states are copied from the GPU.",
         ("benchmarks/async_save.py", "--gpu", "--sizes", "12x768", "24x1024", "--out", "OUT/async_save_gpu.json"), 3,
         results("async_save_gpu")),
    Part("kernels", "Losses and gradient norms by each attention and by Liger's kernels against eager attention.",
         ("benchmarks/kernel_losses.py", "--out", "OUT/kernel_losses_gpu.json"), 4, results("kernel_losses_gpu")),
)  # fmt: skip


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """0: what was run is done; 1: a part failed or was late; 2: there is no GPU."""
    names = [part.name for part in parts]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="no part is started that might end later")
    parser.add_argument("--again", nargs="+", default=[], choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="print the parts and how they ended, and run none")
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
        raise RequestError("nvidia-smi names no GPU, and this measures one. --list says what it would run.")
    out.mkdir(parents=True, exist_ok=True)
    write(out, {name: row for name, row in recorded(out).items() if name not in asked.again}, parts)
    return run_all(parts, out, asked.minutes)


def run_all(parts: Sequence[Part], out: Path, minutes: float) -> int:
    os.chdir(REPO)  # scripts are named from there
    os.environ["HF_HUB_OFFLINE"] = "1"
    begun, has_failed = time.monotonic(), False
    for part in [part for part in parts if part.name not in recorded(out)]:
        left = minutes - (time.monotonic() - begun) / 60
        if part.minutes > left:
            print(f"{part.name}: left for another start; it may take {part.minutes:.0f} of {left:.1f} minutes")
            continue
        print(f"{part.name}: {in_words(part)}", flush=True)
        row = measured(part, out)
        print(f"{part.name}: {row['status']} after {row['seconds']:.0f} s. {row['reason'] or ''}", flush=True)
        write(out, {**recorded(out), part.name: row}, parts)
        has_failed |= row["status"] != DONE
    return int(has_failed)


def measured(part: Part, out: Path) -> dict[str, object]:
    """One part as a process of its own; no path of this machine is kept."""
    started, begun = time.time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        place = str(out.relative_to(REPO) if out.is_relative_to(REPO) else out)  # pages show it
        words = [word.replace(OUT, place) for word in part.command]
        ended = run([sys.executable, *words], log, part.minutes * 60)
        text = log.read_bytes().decode(errors="replace")  # a carriage return stays one: what it overwrites goes
    seconds = time.monotonic() - begun
    old = [name for name in part.files if not (out / name).is_file() or (out / name).stat().st_mtime < started]
    if ended.kind == DONE and old:
        ended = Outcome(CRASHED, f"it ended well, but did not write {', '.join(old)}")
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
    """Without colours and progress, and where in this machine's folders it is."""
    line = re.sub(r"\x1b\[[\d;]*m", "", line.rsplit("\r", 1)[-1].rstrip())
    for path, name in ((str(out), OUT), (str(REPO), "."), (sys.prefix, "PYTHON")):
        line = line.replace(path, name)
    return without_home(line)[:200]


def recorded(out: Path) -> dict[str, dict]:
    path = out / "gpu.json"
    return json.loads(path.read_text(encoding="utf-8"))["parts"] if path.is_file() else {}


def write(out: Path, rows: Mapping[str, Mapping[str, object]], parts: Sequence[Part]) -> None:
    """gpu.json, which is whole at any time, in the order of the parts, and its page."""
    known = {"parts": {part.name: rows[part.name] for part in parts if part.name in rows}}
    for name, text in (("gpu.json", json.dumps(known, indent=1) + "\n"), ("gpu.md", page(known))):
        (out / f"{name}.new").write_text(text, encoding="utf-8")
        os.replace(out / f"{name}.new", out / name)


def page(record: Mapping[str, Mapping[str, dict]]) -> str:
    """docs/results/gpu.md: how each part ended, and what those without a page of their own said."""
    rows = record["parts"]
    lines = ["# On one GPU", "", "Made by `python benchmarks/gpu.py`. OUT is the folder of this page.", ""]
    lines += ["| part | what | ended | seconds | page |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        pages = [f"[{Path(file).stem}]({file})" for file in row["files"] if file.endswith(".md")]
        where = ", ".join(pages) if row["status"] == DONE else ""
        lines.append(f"| {name} | {row['what']} | {row['status']} | {row['seconds']:.0f} | {where or '-'} |")
    for name, row in rows.items():
        versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
        lines += ["", f"## {name}", "", f"`{row['command']}`", ""]
        lines += [f"{row['gpu']}, driver {row['driver']}; {versions}; {row['date']}."]
        lines += ["", f"It ended as `{row['status']}`: {row['reason']}"] if row["reason"] else []
        lines += ["", "```", *row["said"], "```"] if row["said"] else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RequestError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
