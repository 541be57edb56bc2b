"""Folders as recipes and `finetune bench` write them, made in a moment."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'&</style></title>-->\x1b[2J"
GIB = 2**30


def run_folder(folder: Path, steps: int = 30, *, seed: int = 0, finished: bool = True, every: int = 1) -> Path:
    """A classifier's: loss falls, and it is evaluated ten times."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        loss = 0.4 + 2.2 * math.exp(-3 * step / steps) + chance.gauss(0, 0.06)
        seconds = 0.05 * chance.uniform(0.9, 1.3)
        rows.append({
            "step": step, "loss": loss, "grad_norm": chance.uniform(0.5, 2), "epoch": step / 100,
            "learning_rate": 1e-3 * (1 - step / steps), "samples_per_second": 32 / seconds,
            "real_tokens_per_second": 3200 / seconds, "padding_share": 0.1, "step_seconds": seconds,
            "time": 1_795_331_884 + 0.06 * step,
        })  # fmt: skip
        if step % max(steps // 10, 1) < every:
            evaluated = {"eval_loss": loss + 0.1, "eval_accuracy": 1 - loss / 3, "eval_runtime": 1.2}
            rows.append({"step": step, **evaluated, "epoch": step / 100, "time": 1_795_331_884 + 0.06 * step})
    last = rows[-1]
    results = {"eval_accuracy": 0.83, "eval_loss": 0.52, "train_loss": 0.9, "train_runtime": 0.06 * steps,
               "samples_per_second": 610.0, "real_tokens_per_second": 61000.0, "step_seconds_median": 0.052,
               "peak_memory_gib": 1.25, "peak_memory_gib_per_rank": [1.25, 1.22]}  # fmt: skip
    if finished:
        rows.append({"step": last["step"], "train_runtime": 0.06 * steps, "train_loss": 0.9, "samples_per_second": 600})
        (folder / "all_results.json").write_text(json.dumps(results))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(f"learning_rate: 0.001\nmax_steps: {steps}\nseed: {seed}\nmodel_size: tiny\n")
    (folder / "environment.json").write_text(json.dumps({
        "command": "deepspeed --num_gpus 2 recipes/seq_cls.py --max_steps 30", "python": "3.11.7", "gpus": [],
        "machine": "Linux x86_64, 2 CPU cores", "packages": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "started": "2026-11-22T07:18:01Z",
    }))  # fmt: skip
    (folder / "confusion_matrix.json").write_text(
        json.dumps({"labels": ["asyncio", "email", "http"], "counts": [[40, 3, 2], [1, 52, 0], [4, 4, 31]]})
    )
    (folder / "samples.md").write_text("## Step 30\n\n```\nThe interpreter reads <stdin> & more\n```\n")
    (folder / "README.md").write_text(
        "---\ntags: [finetune]\n---\n# text classification on built\\-in docstrings\n\nIt is.\n"
    )
    return folder


LAYOUTS = {"none": (1, 1.0, 1.0), "ddp": (2, 1.6, 1.05), "zero1": (2, 1.55, 0.8), "zero2": (2, 1.5, 0.72),
           "zero3": (2, 1.1, 0.6), "zero2_offload": (2, 0.7, 0.5), "pipeline": (2, 1.3, 0.55)}  # fmt: skip
MODELS = {"gptlite": (120.0, 0.9, 128), "mlp_wide": (4200.0, 2.4, 0), "mlp_deep": (900.0, 1.1, 0)}


def bench_folder(folder: Path, *, repeats: int = 3, models: tuple[str, ...] = tuple(MODELS)) -> Path:
    """Three models over seven layouts; one cell runs out of memory, one cannot be, one repeat crashes."""
    chance = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        bench_row(model, layout, repeat, chance)
        for repeat in range(repeats) for model in models for layout in LAYOUTS
    ]  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "bench.yaml").write_text("models: [gptlite, mlp_wide]\nlayouts: [none, ddp]\n")
    return folder


def bench_row(model: str, layout: str, repeat: int, chance: random.Random) -> dict[str, Any]:
    world, speed, held = LAYOUTS[layout]
    base, gib, tokens = MODELS[model]
    rate = base * speed * chance.uniform(0.96, 1.04)
    status, reason = "done", None
    if (model, layout) == ("mlp_wide", "none"):
        status, reason = "oom", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes."
    elif (model, layout) == ("mlp_deep", "pipeline"):
        status, reason = "unsupported", "a pipeline of mlp_deep has no layers to cut"
    elif (model, layout, repeat) == ("gptlite", "zero3", 1):
        status, reason = "crashed", "RuntimeError: [enforce fail at tcp.cc:94] connection closed by peer"
    batch = 8 * world if layout != "pipeline" else 16
    steps = [batch / rate * chance.uniform(0.97, 1.05) for _ in range(20)]
    peak = int(gib * held * GIB)
    done = status == "done"
    return {
        "cell": f"{model}-{layout}-{world}x8", "model": model, "layout": layout,
        "ds_config": layout if layout.startswith("zero") else None, "ds_config_sha256": None, "world_size": world,
        "pipeline_parallel_size": 2 if layout == "pipeline" else 1, "micro_batch": 8,
        "accumulation": 2 if layout == "pipeline" else 1, "checkpoint_interval": 0, "precision": "fp32",
        "repeat": repeat, "status": status, "reason": reason, "step_seconds": steps if done else [],
        "samples_per_second": rate if done else None, "tokens_per_second": rate * tokens if done and tokens else None,
        "losses": [2.0 * math.exp(-step / 12) + 0.4 for step in range(20)] if done else [],
        "parameters": 12_345_678,
        "memory": {
            "peak_bytes": [peak, int(peak * 0.97)][:world],
            "average_bytes": [int(peak * 0.8), int(peak * 0.78)][:world],
            "measured_by": "the allocator", "rss_peak_bytes": [peak + GIB // 2] * world,
            "by_kind": {"parameters": peak // 4, "gradients": peak // 5, "optimizer states": peak // 3},
        } if done else {},
        "planned": {"peak_bytes": int(peak * 1.08), "step_seconds": 1.2 * batch / (base * speed)},
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0"},
        "machine": {"system": "Linux x86_64", "cores": 2, "memory_bytes": 24 * GIB, "gpus": []},
        "git_revision": "46dee73",
        "started": "2026-11-22T07:18:01Z", "seconds": 12.5, "log": f"logs/{model}-{layout}-{repeat}.txt",
    }  # fmt: skip
