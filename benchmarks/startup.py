"""Start-up cost of a recipe: CPU seconds of --help, a typo and a wrong path; wall-clock time to the first step and
after the last, compared with the same job as a bare Trainer script, on one process and on two ranks.
Writes docs/results/startup.json and startup.md.

    python benchmarks/startup.py                       # this tree
    python benchmarks/startup.py --before CHECKOUT     # also another checkout, with the same Python, interleaved
    python benchmarks/startup.py --parts ranks         # only the two ranks; keeps the other figures

CPU seconds are the user and system time of the process and its children, as the operating system reports them. The
scripts that are compared run interleaved.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from releases import this_machine

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

PARTS = ("one", "ranks")  # one process, and two ranks
STOCK_ZERO2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}

# The same data and model with transformers and datasets only. The text is the recipe's built-in one, from a file.
STOCK = """
import os, sys
from datasets import load_dataset
from transformers import (AutoTokenizer, DataCollatorWithPadding, DistilBertConfig,
                          DistilBertForSequenceClassification, Trainer, TrainingArguments)

table, tokenizer, folder, config = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
state = {}
if config:
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    state = {"accelerator_config": {"use_configured_state": True}, "deepspeed": config}
data = load_dataset("csv", data_files=table, split="train").class_encode_column("label")
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=512), batched=True)
names = data.features["label"].names
config = DistilBertConfig(n_layers=2, dim=128, hidden_dim=512, n_heads=2, vocab_size=len(tokenizer),
                          num_labels=len(names))
training = TrainingArguments(folder, per_device_train_batch_size=16, max_steps=3, logging_steps=1, save_strategy="no",
                             report_to="none", use_cpu=True, **state)
Trainer(DistilBertForSequenceClassification(config), training, train_dataset=data, processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer)).train()
print("done: stock", flush=True)
"""

FIRST_STEP = """## Time to the first step

Wall-clock seconds from the start of `python` to the first logged step of seq_cls (built-in text, a tiny DistilBERT, 192
rows, fp32, one process). The data had been prepared before. `stock` is a bare Trainer script for the same job."""
ON_RANKS = """## Two ranks

Seconds on two ranks, from `deepspeed --num_gpus 2` (ZeRO-2) to the first logged step, and from the last step to the
prompt. In the latter time, the recipe evaluates, saves, draws plots and writes its model card, and the bare script does
nothing. `processes ending`: the part of it after the script's last line, in which the ranks and DeepSpeed's launcher
end; the launcher looks for ranks that have ended once a second. CPU seconds include all processes, also the launcher's
two, which do not train."""
NOT_SHOWN = "What this does not show: start-up of a GPU, a hub,{} or preparing large data for the first time."

WRITE_TEXT = """
import csv, sys
from finetune.data.builtin import docstring_rows
rows = docstring_rows()
with open(sys.argv[1], "w", newline="") as file:
    csv.writer(file).writerows([list(rows), *list(zip(*rows.values()))[:192]])
"""


def cost(command: list[str], env: dict[str, str]) -> tuple[float, float, int]:
    """CPU seconds, wall-clock seconds, and the exit status."""
    start = time.monotonic()
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    pid = os.posix_spawn(command[0], command, {**os.environ, **env}, file_actions=silent)
    _, status, used = os.wait4(pid, 0)
    return used.ru_utime + used.ru_stime, time.monotonic() - start, os.waitstatus_to_exitcode(status)


def timed_run(command: list[str], env: dict[str, str]) -> dict[str, float]:
    """Seconds until the first step is logged, from the last one to the end, and of these after the last line of the
    script, and CPU seconds of all."""
    before, start, steps = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), list[float]()
    done = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
                          env={**os.environ, "PYTHONUNBUFFERED": "1", **env}) as run:  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            if "'loss'" in line:
                steps.append(time.monotonic() - start)
            elif line.startswith("done: "):
                done = time.monotonic() - start
    took, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode or not steps:
        raise SystemExit(f"{' '.join(command)} logged {len(steps)} steps and ended with {run.returncode}")
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    end = {"last step to prompt": took - steps[-1], "processes ending": took - done}
    return {"first step": steps[0], **end, "CPU": cpu}


def of_tree(tree: Path) -> dict[str, str]:
    """With this environment's programs first: two releases of ninja would compile DeepSpeed's op again and again."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "PATH": path}


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


def first_steps(trees: dict[str, Path], repeats: int, scratch: Path, ranks: int = 1) -> dict:
    """Each tree's seq_cls and the stock script, interleaved, after one round that fills caches."""
    table, flags = scratch / "text.csv", [word for k, v in JOB.items() for word in (f"--{k}", str(v))]
    subprocess.run([sys.executable, "-c", WRITE_TEXT, str(table)], check=True, env={**os.environ, **of_tree(REPO)})
    stock = scratch / "stock.py"
    stock.write_text(STOCK)
    start, config, threads = [sys.executable], "", dict[str, str]()
    if ranks > 1:
        threads = {"OMP_NUM_THREADS": "1"}
        start, config = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)], str(scratch / "z")
        Path(config).write_text(json.dumps(STOCK_ZERO2))
    found: dict[str, dict[str, list[float]]] = {}
    for round_ in range(repeats + 1):
        for name, tree in trees.items():
            env = {**of_tree(tree), "FINETUNE_CACHE": str(scratch / f"cache-{name}")}
            folder = scratch / f"{ranks}-{name}-{round_}"
            command = [*start, str(tree / "recipes" / "seq_cls.py"), *flags, "--output_dir", str(folder)]
            keep(found, name, timed_run(command, env))
        tokenizer = scratch / f"{ranks}-{next(iter(trees))}-0"
        command = [*start, str(stock), str(table), str(tokenizer), str(scratch / "stock"), config]
        env = {**of_tree(REPO), "HF_HOME": str(scratch / "hf"), "DS_ACCELERATOR": "cpu", **threads}
        keep(found, "stock", timed_run(command, env))
    return {name: {what: summary(values[1:]) for what, values in by.items()} for name, by in found.items()}


def keep(found: dict[str, dict[str, list[float]]], name: str, took: dict[str, float]) -> None:
    for what, value in took.items():
        found.setdefault(name, {}).setdefault(what, []).append(value)


def page(record: dict) -> str:
    trees = record["trees"]
    lines = [
        "# Start-up time of a recipe",
        "",
        f"{record['machine']}; {record['versions']}. Medians of {record['repeats']} runs, with the range in "
        "parentheses. Made by `python benchmarks/startup.py --before CHECKOUT`.",
        "",
        "## Commands that need no model",
        "",
        "CPU seconds, user and system. `before` is CHECKOUT, an earlier state of this repository.",
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
    if ranks := record.get("ranks"):
        columns = ("first step", "last step to prompt", "processes ending", "CPU")
        told = f"{ranks['machine']}; load average at the start {ranks['load']:.1f}; {ranks['repeats']} rounds."
        lines += ["", ON_RANKS, "", told, ""]
        lines += [f"| script | {' | '.join(columns)} |", "|---|---|---|---|---|"]
        for name, values in ranks["found"].items():
            lines.append(f"| {name} | {' | '.join(shown(values[what]) for what in columns)} |")
    lines += ["", NOT_SHOWN.format("" if ranks else " several ranks,"), ""]
    return "\n".join(lines)


def shown(values: dict | None) -> str:
    return "" if values is None else f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout to measure as well")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    asked = parser.parse_args()
    trees = {**({"before": asked.before.resolve()} if asked.before else {}), "this tree": REPO}
    back = {name: trees[name] for name in reversed(trees)}
    os.chdir(REPO)
    path = OUT / "startup.json"
    record = json.loads(path.read_text()) if path.is_file() else {}
    record["versions"] = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))
    with tempfile.TemporaryDirectory() as folder:
        if "one" in asked.parts:
            record |= {
                "machine": this_machine(),
                "repeats": asked.repeats,
                "trees": list(trees),
                "answers": answers(trees, asked.repeats),
            }
            found = first_steps(back, asked.repeats, Path(folder))
            record["first_step"] = {name: values["first step"] for name, values in found.items()}
        if "ranks" in asked.parts:
            load = os.getloadavg()[0]
            found = first_steps(back, asked.repeats, Path(folder), ranks=2)
            record["ranks"] = {"machine": this_machine(), "load": load, "repeats": asked.repeats, "found": found}
    path.write_text(json.dumps(record, indent=1) + "\n")
    (OUT / "startup.md").write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
