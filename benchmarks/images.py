"""recipes/image_cls.py: losses of the same steps in every layout. Writes docs/results/images.json.

python benchmarks/images.py        # about five minutes on two cores; pages.py makes the page
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from durability_runs import environment, port
from releases import in_words, this_machine, versions

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "docs" / "results" / "images.json"
STEPS = (1, 3, 6, 10)
GLOBAL_BATCH = 32
TIMEOUT_SECONDS = 200.0
SAME = {
    "max_steps": STEPS[-1],
    "logging_steps": 1,
    "bf16": False,
    "eval_strategy": "no",
    "save_strategy": "no",
    # Adam divides a gradient by its own magnitude. Where that is nearly zero, rounding decides the sign of the step,
    # and within ten steps differences grow from the last digit to the second. SGD shows the layouts' effect, not
    # rounding's.
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


def measure(home: Path) -> dict[str, dict[str, list[float]]]:
    """The logged losses of each model in each layout, by the tests' ranks, which have already imported the stack."""
    sys.path.insert(0, str(REPO / "tests"))
    from warm_ranks import WarmRanks

    warm, found = WarmRanks(), {}
    for model, (flags, layouts) in MODELS.items():
        found[model] = {}
        for number, layout in enumerate(layouts):
            launcher, ranks, micro, accumulation, more = LAYOUTS[layout]
            assert micro * accumulation * (1 if "pipeline_parallel_size" in more else ranks) == GLOBAL_BATCH
            folder = home / f"{model}-{number}".replace(" ", "_").replace(",", "")
            values = {**SAME, **flags, **more, "output_dir": folder, "per_device_train_batch_size": micro}
            values["gradient_accumulation_steps"] = accumulation
            words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
            start = start_of(launcher, ranks)
            command = ["recipes/image_cls.py", *words]
            status, said = warm.run(start, command, ranks, environment(home / "cache"), TIMEOUT_SECONDS)
            if status:
                raise SystemExit(f"{model}, {layout}\n{said[-3000:]}")
            rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            found[model][layout] = [row["loss"] for row in rows if "loss" in row]
            print(model, layout, found[model][layout], flush=True)
    warm.close()
    return found


def start_of(launcher: str, ranks: int) -> list[str]:
    if launcher == "python":
        return [sys.executable]
    count = "--num_gpus" if launcher == "deepspeed" else "--nproc_per_node"
    return [str(Path(sys.executable).with_name(launcher)), count, str(ranks), "--master_port", port()]


def page(found: dict[str, Any]) -> str:
    lines = ["# recipes/image_cls.py: losses of the same steps across layouts", ""]
    made = f"{found['date']}, {found['machine']}; {in_words(found['versions'])}"
    lines += [f"`python benchmarks/images.py`, {made}; fp32, one run each."]
    lines += [
        "See [images.md](../images.md) for the consequences, and [defaults.md](defaults.md) for the accuracy with",
        "default settings.",
        "",
    ]
    lines += [f"Global batch {GLOBAL_BATCH}, SGD, learning rate {SAME['learning_rate']:g}, scikit-learn's digits. The"]
    lines += ["last column has the largest relative difference from the loss of one process at any step.", ""]
    lines.append("| model | layout | " + " | ".join(f"step {step}" for step in STEPS) + " | largest difference |")
    lines.append("|---|---|" + "---|" * (len(STEPS) + 1))
    for model, layouts in found["losses"].items():
        first = next(iter(layouts.values()))
        for layout, losses in layouts.items():
            apart = max(abs(b / a - 1) for a, b in zip(first, losses, strict=True))
            shown = " | ".join(f"{losses[step - 1]:.4f}" for step in STEPS)
            far = "" if losses is first else f"{apart:.2%}" if apart > 1e-4 else f"{apart:.0e}"
            lines.append(f"| {model.replace('a rank', 'per rank')} | {layout} | {shown} | {far} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        losses = measure(Path(home))
    found = {"date": time.strftime("%Y-%m-%d"), "machine": this_machine()}
    found["versions"] = versions()
    OUT.write_text(json.dumps({**found, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
