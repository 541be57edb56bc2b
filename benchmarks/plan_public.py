"""Published measurements on GPUs, compared with `finetune plan`:

    python benchmarks/plan_public.py

Prints the page docs/results/plan_public.md from docs/results/plan_public.json, which has only the published figures.
Every plan is computed anew.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_bert
import plan_longest
import plan_others
import plan_speed

from finetune import plan
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.plan import shown_bytes

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
MIB, GIB = 2**20, 2**30
SHOWN_GB = 1000 * MIB  # a GB of those who read MiB in nvidia-smi
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FP16_BYTES = 2
EVERY_ROW = {"deepspeed": "none", "use_peft": True, "gradient_checkpointing": True, "loss_chunk_tokens": 0,
            "recipe": "causal_lm", "gpus_per_node": 1, "global_batch_size": 0, "search": False}  # fmt: skip

HEAD = """# Plans compared with published measurements

`python benchmarks/plan_public.py`

Published figures, compared with what `finetune plan` says about the same run. We measured none of them
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
BOTH = """
## Allocator peaks and nvidia-smi on A100s

Source: foundation-model-stack/fms-acceleration, scripts/benchmarks/refs, the runs without its kernels. They train with
the Trainer on full blocks of 4,096 tokens, in bf16, with flash attention 2, gradient checkpointing and torch's unfused
AdamW; LoRA of rank 16 is on the attention projections. Two GPUs share weights by FSDP. The first two columns are the
peak of `torch.cuda.max_memory_allocated` and that of nvidia-smi, which the authors averaged over the GPUs.

transformers 4.48 (4.45 for PowerLM) copied the logits to shift them, so the plan has 4 (2) bytes per logit added to its
forward peak. Its 4-bit runs use double quantization.
Excluded are full fine-tuning and 4 bits on two GPUs: they keep no fp32 weights, and shard 4-bit weights, which plans do
not support. Speeds of Mixtral are excluded: its experts were a loop in Python. PowerLM, a Granite, is planned as a
Llama of its shape. The runs used version 1 of FSDP, plans follow version 2. By its two batches, Mistral takes one
gathered layer more there, which version 1 prefetches before the loss goes back, and 97,142 bytes more of each token
than on one GPU, about 3 of each logit; we do not know what holds them.

What nvidia-smi shows is the allocator's peak, a fifth more, and the CUDA context. The fifth (`RESERVED` in
`finetune/plan/plan.py`) is fitted to the two published columns of the rows with one GPU here. All other rows of this
page are held out.
"""
SECOND = """
## A whole device on an A100

Source: the README of QwenLM/Qwen ("Profiling of Memory and Speed"): LoRA of rank 64 on every linear layer of the first
Qwen, bf16, flash attention, batches of one sample, on an A100 with 80 GB. The README does not say how it measured. We
take its figures as those of nvidia-smi, and a GB as 1,000 MiB: 162 GB on two GPUs is more than their memory, if a GB is
a GiB. Rows with trained embeddings are excluded: the authors trained them in bf16, and peft now makes them fp32.
"""
THIRD = """
## Whole devices under ZeRO-3

Source: the same table; full fine-tuning and LoRA of rank 64 with gradient checkpointing, in GB over all GPUs. Software
of 2023; neither the publication nor DeepSpeed's current code explains the errors.
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
    """GB of the device."""
    machine = find_machine("A100-80GB")
    peak = max(
        planned_bytes(
            model, machine.name, bf16=True, dtype="bfloat16", lora_r=64, lora_target_modules=EVERY_LINEAR,
            per_device_train_batch_size=1, block_size=row["tokens"], attn_implementation="flash_attention_2",
        )
    )  # fmt: skip
    return shown_bytes(machine, int(peak)) / SHOWN_GB


def allocated(row: dict[str, Any], models: dict[str, Any]) -> float:
    """Bytes at the peak of a step, as the allocator counts them in the software of this row."""
    job, machine = plan_speed.job_of(row, models), find_machine("A100-80GB")
    peaks = plan_memory(replace(job, eval_batch=0), machine).peaks
    logits: int = row["logit_bytes"] * job.micro_batch * job.tokens * job.model.vocab_size
    return max(peaks["forward"].bytes + logits, *(peak.bytes for peak in peaks.values()))


def summary(errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, over {len(sizes)} rows."


def section(
    head: str, columns: str, unit: str, rows: list[dict[str, Any]], planned: Callable[[dict[str, Any]], float]
) -> list[str]:
    """`columns`: keys of a row; the last one is the measured size."""
    names, sizes = columns.split(), [planned(row) for row in rows]
    errors = [size / row[names[-1]] - 1 for row, size in zip(rows, sizes, strict=True)]
    digits, places = (0, 1) if unit == "MiB" else (1, 0)
    said = [
        (
            *(row[name] for name in names[:-1]),
            f"{row[names[-1]]:.{digits}f}",
            f"{size:.{digits}f}",
            f"{error:+.{places}%}",
        )
        for row, size, error in zip(rows, sizes, errors, strict=True)
    ]
    titles = [*names[:-1], f"measured {unit}", f"planned {unit}", "error"]
    return [head, f"Absolute error: {summary(errors)}", "", *plan_speed.table(titles, said)]


def both_columns(rows: list[dict[str, Any]], models: dict[str, Any]) -> list[str]:
    machine, said, errors = find_machine("A100-80GB"), list[list[object]](), list[tuple[float, float]]()
    for row in rows:
        peak = allocated(row, models)
        shown = shown_bytes(machine, int(peak)) / MIB
        errors.append((peak / row["allocated_bytes"] - 1, shown / row["smi_mib"] - 1))
        how = ("4 bits, LoRA" if row.get("packed") else "LoRA") if row["lora"] else "full"
        said.append([
            row["model"], how, row["gpus"], row["batch"],
            f"{row['allocated_bytes'] / GIB:.2f}", f"{peak / GIB:.2f}", f"{errors[-1][0]:+.1%}",
            f"{row['smi_mib'] / 1024:.2f}", f"{shown / 1024:.2f}", f"{errors[-1][1]:+.0%}",
        ])  # fmt: skip
    held_out = [shown for row, (_, shown) in zip(rows, errors, strict=True) if row["gpus"] > 1]
    columns = ["model", "weights", "GPUs", "batch", "allocator GiB", "planned", "error", "nvidia-smi GiB", "planned",
               "error"]  # fmt: skip
    peaks, devices = zip(*errors, strict=True)
    return [BOTH, f"Absolute error of the allocator's peak: {summary(peaks)}", f"Of nvidia-smi: {summary(devices)}",
            f"Of these held out, with two GPUs: {summary(held_out)}", "", *plan_speed.table(columns, said)]  # fmt: skip


def page(data: dict[str, Any]) -> str:
    models = data["models"]

    def of_model(planned: Callable[[dict[str, Any], dict[str, Any]], float]) -> Callable[[dict[str, Any]], float]:
        return lambda row: planned(row, models[row["model"]])

    parts = [
        *section(HEAD, "model attention batch tokens mib", "MiB", data["t4"], of_model(on_t4)),
        *both_columns([row for row in data["speed"] if "smi_mib" in row], models),
        *section(SECOND, "model tokens gb", "GB", data["a100"], of_model(on_a100)),
        *section(THIRD, "model gpus lora tokens gb", "GB", data["qwen_zero3"], lambda row: device_gb(row, models)),
    ]  # fmt: skip
    berts = [plan_bert.speed(row) for row in data["bert"]]
    parts += [*plan_bert.page(data), *plan_longest.page(data), *plan_speed.page(data, berts)]
    return "\n".join([*parts, *plan_others.page(data)]) + "\n"


def device_gb(row: dict[str, Any], models: dict[str, Any]) -> float:
    """GB of all devices together."""
    machine = find_machine("A100-80GB")
    job = plan_speed.job_of({**row, "gpus_per_node": row["gpus"]}, models)
    shown = shown_bytes(machine, step_peak(job, machine))
    return float(row["gpus"] * shown) / SHOWN_GB


def step_peak(job: Job, machine: Machine) -> int:
    """The peak of a step in bytes, without evaluation."""
    return plan_memory(job, machine).peak.bytes


if __name__ == "__main__":
    print(page(json.loads((RESULTS / "plan_public.json").read_text())), end="")
