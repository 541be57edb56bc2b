"""What others measured on GPUs and published, beside what `finetune plan` says:

    python benchmarks/plan_public.py

Prints the page docs/results/plan_public.md from docs/results/plan_public.json, which has the published figures alone.
Every plan is made anew.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

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

HEAD = """# Planned beside what others measured

`python benchmarks/plan_public.py`

The figures of seven publications, which nobody here measured, beside what `finetune plan` says of the same run with
`--loss_chunk_tokens 0`, since all computed all logits at once. No row was changed, or left out for its error.

# Memory

## Allocator peaks on a T4

Source: fitcheck-llm 0.3.1 (its source distribution on PyPI, data/measurements; MIT), a bare loop over a peft model:
LoRA of rank 32 on the projections of attention, fp16, AdamW, torch 2.10 and 2.14, one run each; repeats of four of them
were equal to the bit. Its script holds the model's output during the backward pass, which the Trainer does not: one
fp16 tensor of logits is added to the plan. Its 4-bit rows are left out: peft's `prepare_model_for_kbit_training` keeps
embeddings, head and norms in fp32 there, and our recipe does not.
"""
SECOND = """
## A whole device on an A100

Source: the README of QwenLM/Qwen ("Profiling of Memory and Speed"): LoRA of rank 64 on every linear layer of the first
Qwen, bf16, flash attention, batches of one sample, on an A100 of 80 GB. It does not say how it measured; taken here as
GiB of the device, so the plan has the CUDA context and the allocator's loss of the machine's profile added. The
model of 1.8 billion parameters lies further off than the others at every length but the longest, which the publication
does not explain. Its rows with trained embeddings are left out: it trained them in bf16, and peft now makes
them fp32.
"""
THIRD = """
## Whole devices under ZeRO-3

Source: the same table, full fine-tuning and LoRA of rank 64 with gradient checkpointing, GiB of all GPUs together. Its
stack of 2023 held more than the plan has, which neither the publication nor DeepSpeed's code of today explains.
"""


def planned_bytes(model: dict[str, Any], gpu: str, **flags: Any) -> tuple[float, float]:
    """Peaks of the backward and of the forward pass; there is no evaluation in what was measured."""
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
    return f"- median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, of {len(sizes)}"


def page(data: dict[str, Any]) -> str:
    models = data["models"]
    first = [(row, on_t4(row, models[row["model"]])) for row in data["t4"]]
    second = [(row, on_a100(row, models[row["model"]])) for row in data["a100"]]
    errors = [planned / row["mib"] - 1 for row, planned in first]
    lines = [HEAD, summary(errors), "", "| model | attention | samples x tokens | measured MiB | planned | error |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['attention']} | {row['batch']} x {row['tokens']} | {row['mib']:.0f} | {planned:.0f} "
        f"| {error:+.1%} |"
        for (row, planned), error in zip(first, errors, strict=True)
    ]
    errors = [planned / row["gib"] - 1 for row, planned in second]
    lines += [SECOND, summary(errors), "", "| model | tokens | measured GiB | planned | error |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['tokens']} | {row['gib']:.1f} | {planned:.1f} | {error:+.0%} |"
        for (row, planned), error in zip(second, errors, strict=True)
    ]
    third = [(row, plan_speed.device_gb(row, models, step_peak)) for row in data["qwen_zero3"]]
    errors = [planned / row["gb"] - 1 for row, planned in third]
    lines += [THIRD, summary(errors), "", "| model | GPUs | tuned | tokens | measured GiB | planned | error |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['gpus']} | {'LoRA' if row['lora'] else 'full'} | {row['tokens']} | {row['gb']:.1f} "
        f"| {planned:.1f} | {error:+.0%} |"
        for (row, planned), error in zip(third, errors, strict=True)
    ]
    return "\n".join([*lines, *plan_speed.page(data)]) + "\n"


def step_peak(job: Job, machine: Machine) -> int:
    """Bytes; nothing was evaluated."""
    return plan_memory(job, machine).peak.bytes


if __name__ == "__main__":
    print(page(json.loads((RESULTS / "plan_public.json").read_text())), end="")
