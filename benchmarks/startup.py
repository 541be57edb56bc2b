"""What a recipe costs before it trains: --help, a typo and a wrong path in CPU seconds, and the first step by the clock
beside the same job as a bare Trainer script. Writes docs/results/startup.json and startup.md.

    python benchmarks/startup.py                       # this tree
    python benchmarks/startup.py --before CHECKOUT     # and another one, by the same Python, in turn

CPU seconds are user and system time of the process and its children, by the operating system's account. The two
scripts of a pair run in turn.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results"
RECIPES = ("seq_cls", "causal_lm", "causal_lm_pipeline", "image_cls", "token_cls")
ASKED = {
    "--help": ["--help"],
    "a typo": ["--batch_size", "8"],
    "a wrong path": ["--train_file", "nowhere.csv"],
}
JOB = {
    "max_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "bf16": False,
    "max_train_samples": 192,
    "report_to": "none",
}

# The same data and model by transformers and datasets alone. The text is the recipe's built-in one, written to a file.
STOCK = """
import sys
from datasets import load_dataset
from transformers import (AutoTokenizer, DataCollatorWithPadding, DistilBertConfig,
                          DistilBertForSequenceClassification, Trainer, TrainingArguments)

table, tokenizer, folder = sys.argv[1:4]
data = load_dataset("csv", data_files=table, split="train").class_encode_column("label")
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=512), batched=True)
names = data.features["label"].names
config = DistilBertConfig(n_layers=2, dim=128, hidden_dim=512, n_heads=2, vocab_size=len(tokenizer),
                          num_labels=len(names))
training = TrainingArguments(folder, per_device_train_batch_size=16, max_steps=3, logging_steps=1, save_strategy="no",
                             report_to="none", use_cpu=True)
Trainer(DistilBertForSequenceClassification(config), training, train_dataset=data, processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer)).train()
"""

FIRST_STEP = """Seconds by the clock from the start of `python` to the first logged step of seq_cls (built-in text, a
tiny DistilBERT, 192 rows, fp32, one process), data prepared before, beside a bare Trainer script for the same job:"""
NOT_SHOWN = (
    "What it does not show: a GPU's start, a hub, several ranks, or large data that is prepared for the first time."
)

WRITE_TEXT = """
import csv, sys
from finetune.data.builtin import docstring_rows
rows = docstring_rows()
with open(sys.argv[1], "w", newline="") as file:
    csv.writer(file).writerows([list(rows), *list(zip(*rows.values()))[:192]])
"""


def cost(command: list[str], env: dict[str, str]) -> tuple[float, float, int]:
    """CPU seconds, seconds, and the exit status."""
    start = time.monotonic()
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    pid = os.posix_spawn(command[0], command, {**os.environ, **env}, file_actions=silent)
    _, status, used = os.wait4(pid, 0)
    return used.ru_utime + used.ru_stime, time.monotonic() - start, os.waitstatus_to_exitcode(status)


def first_step(command: list[str], env: dict[str, str]) -> float:
    """Seconds until the first logged step is printed."""
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
                          env={**os.environ, "PYTHONUNBUFFERED": "1", **env}) as run:  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            if "'loss'" in line:
                seconds = time.monotonic() - start
                break
        else:
            raise SystemExit(f"{' '.join(command)} logged no step")
        run.communicate()
    return seconds


def of_tree(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def answers(trees: dict[str, Path], repeats: int) -> dict:
    found: dict = {}
    for recipe in RECIPES:
        for what, words in ASKED.items():
            for _ in range(repeats):
                for name, tree in trees.items():
                    script = tree / "recipes" / f"{recipe}.py"
                    if script.is_file():
                        cpu, _, status = cost([sys.executable, str(script), *words], of_tree(tree))
                        assert status == (0 if what == "--help" else 2), (script, words, status)
                        found.setdefault(recipe, {}).setdefault(what, {}).setdefault(name, []).append(cpu)
    return {r: {w: {n: summary(v) for n, v in t.items()} for w, t in ws.items()} for r, ws in found.items()}


def first_steps(trees: dict[str, Path], repeats: int, scratch: Path) -> dict:
    """Each tree's seq_cls and the stock script, in turn, after one round that fills caches."""
    table, flags = scratch / "text.csv", [word for k, v in JOB.items() for word in (f"--{k}", str(v))]
    subprocess.run([sys.executable, "-c", WRITE_TEXT, str(table)], check=True, env={**os.environ, **of_tree(REPO)})
    stock = scratch / "stock.py"
    stock.write_text(STOCK)
    found: dict[str, list[float]] = {}
    for round_ in range(repeats + 1):
        for name, tree in trees.items():
            env = {**of_tree(tree), "FINETUNE_CACHE": str(scratch / f"cache-{name}")}
            folder = scratch / f"{name}-{round_}"
            command = [sys.executable, str(tree / "recipes" / "seq_cls.py"), *flags, "--output_dir", str(folder)]
            found.setdefault(name, []).append(first_step(command, env))
        tokenizer = scratch / f"{next(iter(trees))}-0"
        command = [sys.executable, str(stock), str(table), str(tokenizer), str(scratch / "stock")]
        found.setdefault("stock", []).append(first_step(command, {**of_tree(REPO), "HF_HOME": str(scratch / "hf")}))
    return {name: summary(values[1:]) for name, values in found.items()}


def page(record: dict) -> str:
    trees = record["trees"]
    lines = [
        "# What a recipe costs before it trains",
        "",
        f"{record['machine']}; {record['versions']}; medians of {record['repeats']} (smallest to largest). Made by "
        "`python benchmarks/startup.py --before CHECKOUT`.",
        "",
        "CPU seconds, user and system, of a command that needs no model:",
        "",
        "| recipe | command | " + " | ".join(trees) + " |",
        "|---|---|" + "---|" * len(trees),
    ]
    for recipe, asked in record["answers"].items():
        for what, by_tree in asked.items():
            cells = [shown(by_tree.get(name)) for name in trees]
            lines.append(f"| {recipe} | {what} | " + " | ".join(cells) + " |")
    lines += ["", FIRST_STEP, "", "| script | seconds |", "|---|---|"]
    lines += [f"| {name} | {shown(values)} |" for name, values in record["first_step"].items()]
    lines += ["", NOT_SHOWN, ""]
    return "\n".join(lines)


def shown(values: dict | None) -> str:
    return "" if values is None else f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, to measure in turn")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    trees = {**({"before": asked.before.resolve()} if asked.before else {}), "this tree": REPO}
    os.chdir(REPO)
    with tempfile.TemporaryDirectory() as folder:
        record = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed")),
            "repeats": asked.repeats,
            "trees": list(trees),
            "answers": answers(trees, asked.repeats),
            "first_step": first_steps({name: trees[name] for name in reversed(trees)}, asked.repeats, Path(folder)),
        }
    (OUT / "startup.json").write_text(json.dumps(record, indent=1) + "\n")
    (OUT / "startup.md").write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
