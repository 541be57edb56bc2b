"""Published runs of BERT on V100s, compared with `finetune plan`: a part of docs/results/plan_public.md, which
plan_public.py prints. Every plan is computed anew; eager attention of BERT is traced for it, which needs torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plan_speed import Speed, kind_of, table

from finetune.plan.job import DEEPSPEED, TRAINER, Job
from finetune.plan.kernels import SIMPLE
from finetune.plan.machine import find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of
from finetune.plan.named import find_model_config
from finetune.plan.optimizers import Optimizer
from finetune.plan.plan import RESERVED
from finetune.plan.seconds import plan_seconds
from finetune.plan.update import SEARCH

MODEL = "bert-large-uncased"
SEARCH_OF_2020 = 3
CONTEXT_MIB = 1343  # as the guide measured it, with CUDA 11.2
MIB = 2**20
HEAD = """
## BERT on V100s

BERT-large with eager attention and dropout, on one GPU.

- guide: the documentation of transformers 4.21, "Efficient Training on a Single GPU": classification of full samples of
  512 tokens by the Trainer, on a V100 with 16 GB; what NVML shows after the run, and samples/s of a run of one minute,
  its first steps included. The context is as large as it measured. Its loop of AdamW is planned as a fused one. The
  seconds per launch of V100s are fitted to its rows in fp16 with one sample.
- DeepSpeed: its tutorial "BERT fine-tuning", tables 2 and 3, the columns of PyTorch: SQuAD in fp16, 384 tokens. In
  2020 it searched gradients for infinities with three operators each (runtime/utils.py of 0.3), today with twelve: the
  plan has the host's time for nine subtracted.
- benchmarks: mli/transformers-benchmarks, transformers.ipynb of commit db3d30e, classification by the Trainer in 19
  steps, the first included. Its row of GPT-2 is excluded: in transformers 4.22 the host waited twice in each layer,
  for constants on their way to the device.

In fp16 the rows with one sample wait for the host, and the others for the device. What makes the first row in fp16 and
the last one slower than planned, we do not know: single layers of BERT in fp16 are as fast on a V100 as planned (the
same repository, micro_bench.ipynb of commit 53a232b).
"""


def job_of(row: dict[str, Any]) -> Job:
    model = model_of(find_model_config(MODEL), MODEL, row["head"], "eager")
    return Job(
        model, DEEPSPEED if row["layout"] == "zero0" else TRAINER, micro_batch=row["batch"], tokens=row["tokens"],
        accumulation=row["accumulation"], precision=row["precision"], checkpoint_interval=int(row["checkpointing"]),
        attention="eager", optimizer=Optimizer(row["optimizer"]),
    )  # fmt: skip


def speed(row: dict[str, Any]) -> Speed:
    job, published = job_of(row), row["samples_per_second"]
    if row["source"] == "guide" and row["optimizer"] == "adam":
        job = replace(job, optimizer=Optimizer("adam_foreach"))
    machine = find_machine(row["gpu"])
    step = plan_seconds(job, machine)
    fewer = (SEARCH - SEARCH_OF_2020) * SIMPLE * len(job.model.tensors) * machine.launch_seconds
    planned = step.samples / (step.total - fewer * (job.engine == DEEPSPEED))
    used = row["source"] == "guide" and row["precision"] == "fp16" and row["batch"] == 1
    return Speed((f"{published:.2f}", f"{planned:.2f}"), planned / published - 1, used, kind_of(row["tokens"], 1))


def shown_mib(row: dict[str, Any]) -> float:
    """What NVML shows."""
    machine = find_machine(row["gpu"])
    peak = plan_memory(job_of(row), machine).peak.bytes
    return min(machine.memory_bytes / MIB, CONTEXT_MIB + (1 + RESERVED) * peak / MIB)


def page(data: dict[str, Any]) -> list[str]:
    lines = list[list[str]]()
    for row in data["bert"]:
        fast, memory = speed(row), ["-", "-", "-"]
        if "smi_mib" in row:
            size = shown_mib(row)
            memory = [f"{row['smi_mib']:,}", f"{size:,.0f}", f"{size / row['smi_mib'] - 1:+.0%}"]
        lines.append([
            row["source"], row["gpu"], row["precision"], f"{row['batch']} x {row['accumulation']}",
            "yes" if row["checkpointing"] else "no", row["optimizer"], *memory, *fast.cells, fast.shown,
        ])  # fmt: skip
    columns = ["source", "GPU", "precision", "batch", "checkpointing", "optimizer", "nvidia-smi MiB", "planned",
               "error", "samples/s", "planned", "error"]  # fmt: skip
    return [HEAD, *table(columns, lines)]
