"""What each recipe comes to by its first line in the README, all defaults: seconds by the clock, and its final figures.

    python benchmarks/defaults.py            # some twelve minutes on two cores
    python benchmarks/defaults.py seq_cls    # this one alone

A row each goes to docs/results/defaults.jsonl; benchmarks/pages.py makes the page of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from releases import in_words, versions

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results" / "defaults.jsonl"
RECIPES = ("seq_cls", "token_cls", "question_answering", "causal_lm", "image_cls")
SHOWN = {
    "seq_cls": {"accuracy": "eval_accuracy"},
    "token_cls": {"entity F1": "eval_f1"},
    "question_answering": {"exact match": "eval_exact_match", "F1": "eval_f1"},
    "causal_lm": {"bits per byte": "eval_bits_per_byte"},
    "image_cls": {"accuracy": "eval_accuracy"},
}
HEAD = """# What the recipes come to by their defaults

`python benchmarks/defaults.py`, two CPU cores, one run each, by `deepspeed --num_gpus 2 recipes/RECIPE.py`; {versions}.
Seconds are by the clock; other programs ran at the same time.
"""


def measure(recipe: str) -> dict[str, Any]:
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [launcher, "--num_gpus", "2", f"recipes/{recipe}.py", "--output_dir", str(run)]
        began = time.monotonic()
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        row = {"recipe": recipe, "seconds": round(seconds, 1), **json.loads((run / "all_results.json").read_text())}
        if recipe == "seq_cls":
            row["held_out_by_class"] = held_out(json.loads((run / "confusion_matrix.json").read_text()))
    if recipe == "token_cls":
        row["f1_of_the_name_alone"] = baseline()
    if recipe == "question_answering":
        row["without_reading"] = without_reading()
    return row | {"date": time.strftime("%Y-%m-%d"), "versions": versions()}


def held_out(found: dict[str, Any]) -> dict[str, int]:
    """Texts of each class in the held-out rows."""
    return {name: sum(row) for name, row in zip(found["labels"], found["counts"], strict=True)}


def baseline() -> float:
    """Entity F1 where every word gets the tag that it has most often in training."""
    from token_cls_baseline import by_name_alone

    return by_name_alone()


def without_reading() -> dict[str, dict[str, float]]:
    """Exact match and F1 of answers that need no model."""
    import question_answering_baseline as baselines

    return baselines.without_reading()


def page(rows: list[dict[str, Any]]) -> str:
    latest = {row["recipe"]: row for row in rows}
    lines = [HEAD.format(versions=in_words(rows[-1]["versions"]))]
    lines += ["| recipe | date | seconds in all | training | held-out | result |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for recipe, row in latest.items():
        result = ", ".join(f"{name} {row[key]:.3f}" for name, key in SHOWN[recipe].items())
        held = f"{row['eval_samples']:,}" if "eval_samples" in row else ""  # a text is held out as a whole
        spent = f"{row['seconds']:.0f} | {row['train_runtime']:.0f}"
        lines.append(f"| {recipe} | {row['date']} | {spent} | {held} | {result} |")
    classes = latest["seq_cls"]["held_out_by_class"]
    most = max(classes, key=lambda name: classes[name])
    lines += ["", f"seq_cls: {latest['seq_cls']['train_samples']:,} texts to train on, {len(classes)} classes; always "]
    lines[-1] += f"guessing the largest ({most}) gives {classes[most] / sum(classes.values()):.2f}. token_cls: the tag "
    lines[-1] += "that a name has most often in training makes an entity F1 of "
    lines[-1] += f"{latest['token_cls']['f1_of_the_name_alone']:.3f} (benchmarks/token_cls_baseline.py)."
    if "question_answering" in latest:
        nearest, last = latest["question_answering"]["without_reading"].values()
        lines[-1] += " question_answering: the line of the function with the most words of the question has an F1 of "
        lines[-1] += f"{nearest['f1']:.3f}, its last line {last['f1']:.3f} (benchmarks/question_answering_baseline.py)."
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES, help=", ".join(RECIPES))
    for recipe in parser.parse_args().recipes:
        row = measure(recipe)
        rows = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.is_file() else []
        rows = [old for old in rows if old["recipe"] != recipe] + [row]
        OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
