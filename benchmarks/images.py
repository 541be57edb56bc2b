"""recipes/image_cls.py: accuracy on the digits, and the loss of the same steps in every layout; into docs/results/.

python benchmarks/images.py                        # a quarter of an hour on two quiet cores
python benchmarks/images.py --runs runs/images     # in parts: what has ended there is not run again
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
RESULT = REPO / "docs" / "results" / "images.md"
STEPS = (1, 3, 6, 10)
GLOBAL_BATCH = 32
TIMEOUT_SECONDS = 280
SAME = {
    "max_steps": STEPS[-1],
    "logging_steps": 1,
    "bf16": False,
    "eval_strategy": "no",
    "save_strategy": "no",
    # Adam divides a gradient by its own size: where it is all but zero, rounding decides the step's sign, and in ten
    # steps the last digit has become the second. SGD shows what the layouts do, and not what rounding does.
    "optim": "sgd",
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "lr_scheduler_type": "constant",
}

# Launcher, ranks, micro-batch, accumulation, other flags.
LAYOUTS: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "1 process": ("python", 1, 32, 1, {}),
    "DDP, 2 ranks": ("torchrun", 2, 16, 1, {}),
    "ZeRO-1, 2 ranks": ("deepspeed", 2, 16, 1, {"deepspeed": "zero1"}),
    "ZeRO-2, 2 ranks": ("deepspeed", 2, 16, 1, {"deepspeed": "zero2"}),
    "ZeRO-2, 2 ranks, 2 micro-batches": ("deepspeed", 2, 8, 2, {"deepspeed": "zero2"}),
    "ZeRO-3, 2 ranks": ("deepspeed", 2, 16, 1, {"deepspeed": "zero3"}),
    "pipeline, 2 stages, 4 micro-batches": ("deepspeed", 2, 8, 4, {"pipeline_parallel_size": 2, "schedule_step": 0}),
}
TRAINER = [name for name in LAYOUTS if not name.startswith("pipeline")]
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ResNet, batch norm a rank": ({}, TRAINER),
    "ResNet, batch norm over all ranks": ({"sync_batch_norm": True}, TRAINER),
    "ResNet, group norm": ({"norm": "group"}, TRAINER),
    "AlexNet": ({"model_type": "alexnet", "dropout": 0.0}, list(LAYOUTS)),
}


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def launch(folder: Path, launcher: str, ranks: int, flags: dict[str, Any]) -> float:
    """Seconds that the run took, from the command to its end; written beside it, for it is not run twice."""
    ended = folder.with_suffix(".seconds")
    if ended.is_file():
        return float(ended.read_text())
    starts = {
        "python": [sys.executable],
        "torchrun": [tool("torchrun"), "--nproc_per_node", str(ranks), "--master_port", "29611"],
        "deepspeed": [tool("deepspeed"), "--num_gpus", str(ranks), "--master_port", "29612"],
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    command = [*starts[launcher], "recipes/image_cls.py", "--output_dir", str(folder), *words]
    start = time.monotonic()
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    seconds = time.monotonic() - start
    ended.write_text(f"{seconds:.1f}")
    return seconds


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def same_loss(home: Path, only: str) -> list[str]:
    lines = ["| model | layout | " + " | ".join(f"step {step}" for step in STEPS) + " | furthest from 1 process |"]
    lines.append("|---|---|" + "---|" * (len(STEPS) + 1))
    for model, (flags, layouts) in MODELS.items():
        if only not in model:
            continue
        first: list[float] = []
        for number, layout in enumerate(layouts):
            launcher, ranks, micro, accumulation, more = LAYOUTS[layout]
            assert micro * accumulation * (1 if "pipeline_parallel_size" in more else ranks) == GLOBAL_BATCH
            batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
            folder = home / f"{model}-{number}".replace(" ", "_").replace(",", "")
            launch(folder, launcher, ranks, {**SAME, **flags, **batch, **more})
            found = losses(folder)
            first = first or found
            apart = max(abs(b / a - 1) for a, b in zip(first, found, strict=True))
            shown = " | ".join(f"{found[step - 1]:.4f}" for step in STEPS)
            lines.append(f"| {model} | {layout} | {shown} | {apart:.2%} |")
            print(lines[-1], flush=True)
    return lines


def accuracy(home: Path) -> list[str]:
    lines = [
        "| launch | accuracy | macro F1 | seconds, from the command to its end | training alone |",
        "|---|---|---|---|---|",
    ]
    for launcher, ranks in (("deepspeed", 2), ("torchrun", 2), ("python", 1)):
        folder = home / f"digits-{launcher}"
        seconds = launch(folder, launcher, ranks, {})
        found = json.loads((folder / "all_results.json").read_text())
        name = f"{launcher}, {ranks} rank(s)"
        lines.append(
            f"| {name} | {found['eval_accuracy']:.4f} | {found['eval_f1_macro']:.4f} | {seconds:.0f} "
            f"| {found['train_runtime']:.0f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder for the runs, kept; default: one that is deleted")
    parser.add_argument("--only", default="", help="models with this in their name; prints, and writes no page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        home = arguments.runs or Path(passing)
        home.mkdir(exist_ok=True)
        table = same_loss(home, arguments.only)
        if arguments.only:
            return
        digits = accuracy(home)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "deepspeed"))
    RESULT.write_text(
        f"""# recipes/image_cls.py: accuracy and the same loss

`python benchmarks/images.py`; {platform.machine()}, CPU; {packages}; fp32. docs/images.md says what follows from it.

## scikit-learn's digits, all defaults: ResNet-18's layout at a quarter of its width, 8 rounds

Of 1,797 pictures a tenth is held out, by class; global batch 16 a rank.

{chr(10).join(digits)}

## The loss of the same steps: global batch of {GLOBAL_BATCH}, SGD, learning rate {SAME["learning_rate"]:g}

{chr(10).join(table)}
"""
    )


if __name__ == "__main__":
    main()
