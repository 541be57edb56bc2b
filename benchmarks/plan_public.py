"""Published measurements on GPUs, compared with `finetune plan`:

    python benchmarks/plan_public.py

Prints the page docs/results/plan_public.md from docs/results/plan_public.json, which has only the published figures.
Every plan is computed anew.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import plan_longest
import plan_speed

from finetune import plan
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
MIB, GIB = 2**20, 2**30
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FP16_BYTES = 2
EVERY_ROW = {"deepspeed": "none", "use_peft": True, "gradient_checkpointing": True, "loss_chunk_tokens": 0,
            "recipe": "causal_lm", "gpus_per_node": 1, "global_batch_size": 0, "search": False}  # fmt: skip

HEAD = """# Plans compared with published measurements

`python benchmarks/plan_public.py`

Figures from eight publications, compared with what `finetune plan` says about the same run. We measured none of them
ourselves. Plans use `--loss_chunk_tokens 0`, because the publications compute all logits at once, unless a row says
otherwise. No row was changed, or excluded because of its error.

# Memory

## Allocator peaks on a T4

Source: fitcheck-llm 0.3.1 (its source distribution on PyPI, data/measurements; MIT). It runs a bare loop over a peft
model: LoRA of rank 32 on the attention projections, fp16, AdamW, torch 2.10 and 2.14, one run each. Four runs were
repeated, with bit-identical results. Unlike the Trainer, its script keeps the model's output during the backward pass,
so the plan has one fp16 tensor of logits added. Its 4-bit rows are excluded, because peft's
`prepare_model_for_kbit_training` keeps embeddings, head and norms in fp32, and our recipe does not.
"""
SECOND = """
## A whole device on an A100

Source: the README of QwenLM/Qwen ("Profiling of Memory and Speed"): LoRA of rank 64 on every linear layer of the first
Qwen, bf16, flash attention, batches of one sample, on an A100 with 80 GB. The README does not say how it measured. We
take its figures as GiB of device memory, so the plan adds the CUDA context and the allocator overhead of the machine's
profile. The model with 1.8 billion parameters is further off than the others at every length but the longest; the
publication does not explain why. Rows with trained embeddings are excluded: the authors trained them in bf16, and peft
now makes them fp32.
"""
THIRD = """
## Whole devices under ZeRO-3

Source: the same table; full fine-tuning and LoRA of rank 64 with gradient checkpointing, in GiB over all GPUs. Its
software from 2023 used more memory than planned. Neither the publication nor DeepSpeed's current code explains why.
"""


def planned_bytes(model: dict[str, Any], gpu: str, **flags: Any) -> tuple[float, float]:
    """Peaks of the backward and of the forward pass; the measurements include no evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**model, "max_position_embeddings": 32768}))
        peaks = plan(folder, gpu=gpu, **EVERY_ROW, **flags).to_dict()["ranks"][0]["peaks"]
    return peaks["backward"], peaks["forward"]


def on_t4(row: dict[str, Any], model: dict[str, Any]) -> float:
    """MiB."""
    backward, forward = planned_bytes(
        model, "T4", fp16=True, dtype="float16", lora_r=32, lora_target_modules=ATTENTION, block_size=row["tokens"],
        per_device_train_batch_size=row["batch"], attn_implementation=row["attention"],
    )  # fmt: skip
    held = row["batch"] * row["tokens"] * model["vocab_size"] * FP16_BYTES
    return max(backward + held, forward) / MIB


def on_a100(row: dict[str, Any], model: dict[str, Any]) -> float:
    """GiB of the device."""
    machine = find_machine("A100-80GB")
    peak = max(
        planned_bytes(
            model, machine.name, bf16=True, dtype="bfloat16", lora_r=64, lora_target_modules=EVERY_LINEAR,
            per_device_train_batch_size=1, block_size=row["tokens"], attn_implementation="flash_attention_2",
        )
    )  # fmt: skip
    return (peak / (1 - machine.fragmentation) + machine.context_bytes) / GIB


def summary(errors: list[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    return f"Absolute error: median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, over {len(sizes)} rows."


def page(data: dict[str, Any]) -> str:
    models = data["models"]
    first = [(row, on_t4(row, models[row["model"]])) for row in data["t4"]]
    second = [(row, on_a100(row, models[row["model"]])) for row in data["a100"]]
    errors = [planned / row["mib"] - 1 for row, planned in first]
    lines = [HEAD, summary(errors), "", "| model | attention | samples x tokens | measured MiB | planned MiB | error |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['attention']} | {row['batch']} x {row['tokens']} | {row['mib']:.0f} | {planned:.0f} "
        f"| {error:+.1%} |"
        for (row, planned), error in zip(first, errors, strict=True)
    ]
    errors = [planned / row["gib"] - 1 for row, planned in second]
    lines += [SECOND, summary(errors), "", "| model | tokens | measured GiB | planned GiB | error |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['tokens']} | {row['gib']:.1f} | {planned:.1f} | {error:+.0%} |"
        for (row, planned), error in zip(second, errors, strict=True)
    ]
    third = [(row, plan_speed.device_gb(row, models, step_peak)) for row in data["qwen_zero3"]]
    errors = [planned / row["gb"] - 1 for row, planned in third]
    lines += [
        THIRD,
        summary(errors),
        "",
        "| model | GPUs | fine-tuning | tokens | measured GiB | planned GiB | error |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['gpus']} | {'LoRA' if row['lora'] else 'full'} | {row['tokens']} | {row['gb']:.1f} "
        f"| {planned:.1f} | {error:+.0%} |"
        for (row, planned), error in zip(third, errors, strict=True)
    ]
    return "\n".join([*lines, *plan_longest.page(data), *plan_speed.page(data)]) + "\n"


def step_peak(job: Job, machine: Machine) -> int:
    """The peak of a step in bytes, without evaluation."""
    return plan_memory(job, machine).peak.bytes


if __name__ == "__main__":
    print(page(json.loads((RESULTS / "plan_public.json").read_text())), end="")
