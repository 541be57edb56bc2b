"""Results of each recipe with its command in the README and default settings: wall-clock time and final metrics.

    python benchmarks/defaults.py            # about twelve minutes on two cores
    python benchmarks/defaults.py seq_cls    # this recipe only

Writes a row per recipe to docs/results/defaults.jsonl; benchmarks/pages.py makes the page.
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
HEAD = """# Results of the recipes with default settings

`python benchmarks/defaults.py`: one run each of `deepspeed --num_gpus 2 recipes/RECIPE.py`, on two CPU cores;
{versions}. Times are wall-clock seconds; other programs ran at the same time.
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
    """The number of held-out texts per class."""
    return {name: sum(row) for name, row in zip(found["labels"], found["counts"], strict=True)}


def baseline() -> float:
    """Entity F1 if every word gets its most frequent tag in training."""
    from token_cls_baseline import by_name_alone

    return by_name_alone()


def without_reading() -> dict[str, dict[str, float]]:
    """Exact match and F1 of baselines without a model."""
    import question_answering_baseline as baselines

    return baselines.without_reading()


def page(rows: list[dict[str, Any]]) -> str:
    latest = {row["recipe"]: row for row in rows}
    lines = [HEAD.format(versions=in_words(rows[-1]["versions"]))]
    lines += ["| recipe | date | total seconds | training seconds | held-out samples | result |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for recipe, row in latest.items():
        result = ", ".join(f"{name} {row[key]:.3f}" for name, key in SHOWN[recipe].items())
        held = f"{row['eval_samples']:,}" if "eval_samples" in row else ""  # a text is held out as a whole
        spent = f"{row['seconds']:.0f} | {row['train_runtime']:.0f}"
        lines.append(f"| {recipe} | {row['date']} | {spent} | {held} | {result} |")
    classes = latest["seq_cls"]["held_out_by_class"]
    most = max(classes, key=lambda name: classes[name])
    lines += ["", f"Baselines. seq_cls has {latest['seq_cls']['train_samples']:,} training texts and {len(classes)} "]
    lines[-1] += f"classes; always guessing the largest ({most}) gives an accuracy of "
    lines[-1] += f"{classes[most] / sum(classes.values()):.2f}. token_cls: giving each name its most frequent tag in "
    lines[-1] += f"training gives an entity F1 of {latest['token_cls']['f1_of_the_name_alone']:.3f} "
    lines[-1] += "(benchmarks/token_cls_baseline.py)."
    if "question_answering" in latest:
        nearest, last = latest["question_answering"]["without_reading"].values()
        lines[-1] += " question_answering: the line of the function that shares the most words with the question has "
        lines[-1] += f"an F1 of {nearest['f1']:.3f}, the last line one of {last['f1']:.3f} "
        lines[-1] += "(benchmarks/question_answering_baseline.py)."
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
