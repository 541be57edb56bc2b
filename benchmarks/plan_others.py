"""Published runs of thirteen more sources: a part of docs/results/plan_public.md, which
plan_public.py prints. Every plan is computed anew; eager attention of BERT-large is traced for it, which needs torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from plan_speed import EVERY_LINEAR, TARGETS, Speed, kind_of, table

from finetune.plan.job import FSDP, TRAINER, Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import Model, in_4bit, model_of, with_lora
from finetune.plan.named import find_model_config
from finetune.plan.optimizers import Optimizer
from finetune.plan.plan import RESERVED, shown_bytes
from finetune.plan.search import laid_out
from finetune.plan.seconds import plan_seconds
from finetune.plan.values import Lora

GIB = 2**30
NAMES = {**TARGETS, "qkv": EVERY_LINEAR[:3], "every": EVERY_LINEAR, "but_o": (*EVERY_LINEAR[:3], *EVERY_LINEAR[4:])}
LAYOUTS = {"none": "Trainer", "fsdp": "FSDP"}
LOOPS = ("autotuning", "NVIDIA")  # their Adam without DeepSpeed or apex goes through the parameters one by one
FUSED_GELU = {"phi-1_5": "gelu_pytorch_tanh"}  # LitGPT's
# What a row says of memory -> the figure of a plan that it is compared with.
SIZES: dict[str, Callable[[Machine, int], float]] = {
    "allocated_gib": lambda _, peak: peak / GIB,
    "reserved_gib": lambda _, peak: (1 + RESERVED) * peak / GIB,
    "device_gib": lambda machine, peak: shown_bytes(machine, peak) / GIB,
}
WORDS = {"allocated_gib": "allocated", "reserved_gib": "reserved", "device_gib": "device"}
STEADY = "all but ms-swift"

HEAD = """
## Thirteen more publications

The first plans of these runs were made from their published configurations, before their figures were compared.
Afterwards we gave the plans InternLM's links, LitGPT's GELU, the fp32 weights of PEFT's FSDP, and the loops of Adam.
The model of step times has changed since, and so have the rates of products of GeForce cards and of the Quadro RTX
8000: they were found in other publications after Answer.AI's rows had been planned 7% to 23% too slow, and Lambda's
rows for the Quadro 11% to 21% too fast. The tables have today's plans. No constant was fitted to these rows, and none
is left out because of its error. They are not in the tables above.

- InternLM: InternLM/InternLM, doc/en/train_performance.md, a Llama of 7 billion parameters with 103,168 tokens, bf16;
  its ZeRO-1 over all ranks is planned as ours. Nodes have 4 x 100 Gb/s, a quarter of the profile's, and so has the
  plan; with the profile's, plans of several nodes are faster still. The row with checkpointing packs samples.
- Answer.AI: AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md: 1,024 samples on two consumer cards without NVLink, the
  3090s limited to 280 W. "Trainer" is DDP. Adapters are in bf16, and ours in fp32. Excluded are 4 bits under FSDP and
  offload by FSDP, which plans do not support, and speeds of FSDP on the 3090s: their board's PCIe is slow, and the
  publication does not say how slow.
- PEFT: its documentation, "DeepSpeed" and "Fully Sharded Data Parallel": 80% and 90% of H100s with 80 GB. Its script
  loads weights in fp32.
- LitGPT: tutorials/resource-tables.md, `torch.cuda.max_memory_allocated` in GB; the longest sample has 1,304 tokens
  (phi-1.5: 1,044). Its GELU is torch's, and so is the plan's. bitsandbytes 0.41 kept the inputs of each product with
  4-bit weights for the backward pass, and 0.50 does not. Excluded are two GPUs, whose peak does not depend on the
  batch, and StableLM.
- bitsandbytes: the blog of Hugging Face, "Making LLMs even more accessible": what fits on a T4. Excluded are 8 bits,
  which plans do not support, and double quantization; FP4 takes as much as NF4.
- autotuning: DeepSpeedExamples, training/autotuning/hf: transformers 4.12 on 16 V100s; we assume 32 GB. Samples/s are
  the Trainer's over 200 steps, with the start of DeepSpeed; "timers" are DeepSpeed's own, of forward, backward and
  step. DDP used a loop of AdamW, planned as the foreach one. They had eager attention; the speeds of encoders, of 128
  tokens, are planned with sdpa, as the command plans them. Batches were doubled until memory was exhausted; the batch
  of BERT-large that was too large would just fit with sdpa.
- NVIDIA: DeepLearningExamples, PyTorch/LanguageModeling/BERT of 2020, fine-tuning on SQuAD; fp16 by apex, with its
  fused layers, is planned as DeepSpeed without ZeRO; fp32 has a loop of Adam, as above. Its rows with 8 samples are as
  fast as those with 4, and in fp16 slower than those with 10: we think that they had 4.
- Lambda: lambdal/deeplearning-benchmark, pytorch/results, logs of one GPU: NVIDIA's fine-tuning on SQuAD, planned as
  above, over 100 steps (A40: 200; A4000: 1,000), the first included. Excluded is fp32: the logs do not say whether
  products ran in TF32.
- Ray: its template 04_finetuning_llms_with_deepspeed: minutes per epoch of 7,473 samples on 16 machines with one A10G.
- accelerate: the blog of Hugging Face, "From DeepSpeed to FSDP and Back Again"; from its step time follow 4,096 tokens,
  and from its batch that it checkpoints.
- FastChat: README, Vicuna-7B on four A100s.
- qlora: artidoro/qlora, issue 17: 65 billion parameters in 4 bits, computed in fp32 by the size of what failed.
- torchtune: the memory of its row in "Many layouts"; weights are in bf16.
- ms-swift: docs/source_en/LLM/Benchmark.md: memory that the allocator reserved, for samples of 91 tokens up to the
  maximum. A plan counts all samples at the maximum, and its fifth for freed blocks is that of equal samples: where
  lengths vary, freed blocks fit less often. The first Qwen's own code also copied logits. Excluded are its speeds.

Also looked at and excluded: a table of LLaMA-7B under ZeRO-2 and ZeRO-3 (chenyaofo's gist d4cd6a20), because we could
not read its units; if it gives samples per second, plans are 1.4 to 1.7 times as fast, and 2.8 to 3.1 times with
offload. PEFT's method_comparison and MosaicML's MI250 state no lengths or batches.
"""
TAIL = """
Where plans are wrong: the allocator reserves more where lengths vary, more than twice as much in one row with 8,192
tokens. Answer.AI's adapters are in bf16, and ours, without FSDP, in fp32, which is slower on its 4090s. Most cards of
2020 and later are slower than planned in Lambda's rows, the RTX 6000 Ada by a fifth to a quarter: what a card of 300 W
reaches was assumed from one of 350 W. InternLM slows down on many nodes, and plans hardly do. On V100s GPT-2 in fp16
and NVIDIA's BERT in fp32 are slower, and BERT in fp32 of "autotuning" is faster. In two rows that were out of memory a
plan fits: 13 billion parameters in 4 bits on a T4, and GPT-2-medium under DDP. We do not know why."""


def model_of_row(row: dict[str, Any], models: dict[str, Any]) -> Model:
    name = row["model"]
    config = {**(models.get(name) or find_model_config(name))}
    if "head" not in row and config["model_type"] != "gpt2":
        config["max_position_embeddings"] = 32768
    if name in FUSED_GELU:
        config["hidden_act"] = FUSED_GELU[name]
    is_eager = row.get("attention") == "eager"
    model = model_of(config, name, row.get("head"), "eager" if is_eager else "sdpa")
    if "lora" not in row:
        return model
    adapter = Lora(row["lora"], NAMES[row["targets"]], row.get("dropout", 0.05))
    return with_lora(in_4bit(model) if row.get("packed") else model, adapter)


def machine_of(row: dict[str, Any]) -> Machine:
    machine = find_machine(row["gpu"])
    if speed := row.get("inter_node_bytes_per_second"):
        return replace(machine, inter_node=replace(machine.inter_node, bandwidth_bytes_per_second=speed))
    return machine


def job_of(row: dict[str, Any], models: dict[str, Any]) -> Job:
    layout = row["layout"]
    loops = row["source"] in LOOPS and layout == "none"
    job = Job(
        model_of_row(row, models), world_size=row["gpus"], ranks_per_node=row.get("gpus_per_node", min(8, row["gpus"])),
        micro_batch=row["batch"], tokens=row["tokens"], accumulation=row.get("accumulation", 1),
        precision=row.get("precision", "bf16"), dtype=row.get("dtype", "float32"),
        checkpoint_interval=int(row.get("checkpointing", False)), attention=row.get("attention", "sdpa"),
        optimizer=Optimizer("adam_foreach" if loops else "adam"),
    )  # fmt: skip
    return replace(job, engine={"none": TRAINER, "fsdp": FSDP}[layout]) if layout in LAYOUTS else laid_out(job, layout)


def peak_of(row: dict[str, Any], models: dict[str, Any]) -> int:
    """Bytes at the peak of a step, without evaluation."""
    return plan_memory(job_of(row, models), machine_of(row)).peak.bytes


def memories(row: dict[str, Any], models: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Of each published size of a row: its kind, GiB, and planned GiB."""
    kinds = [kind for kind in SIZES if kind in row]
    peak = peak_of(row, models) if kinds else 0
    return [(kind, row[kind], SIZES[kind](machine_of(row), peak)) for kind in kinds]


def speed_of(row: dict[str, Any], models: dict[str, Any]) -> Speed:
    step = plan_seconds(job_of(row, models), machine_of(row))
    if "tokens_per_second" in row:
        published, planned, unit = row["tokens_per_second"], step.tokens_per_second / row["gpus"], "tokens/s per GPU"
    else:
        published, planned, unit = row["samples_per_second"], step.samples_per_second, "samples/s"
    cells = (*_described(row), unit, f"{published:,.5g}", f"{planned:,.5g}")
    return Speed(cells, planned / published - 1, False, kind_of(row["tokens"], row["gpus"]))


def fits(row: dict[str, Any], models: dict[str, Any]) -> tuple[bool, float]:
    """Whether a plan fits, and the share of the usable memory that it takes."""
    share = peak_of(row, models) / machine_of(row).usable_bytes
    return share <= 1, share


def speeds(data: dict[str, Any]) -> list[Speed]:
    timed = [row for row in data["others"] if {"tokens_per_second", "samples_per_second"} & {*row}]
    return [speed_of(row, data["models"]) for row in timed]


def _described(row: dict[str, Any]) -> tuple[str, ...]:
    weights = ("4 bits, LoRA" if row.get("packed") else "LoRA") if "lora" in row else "full"
    ends = ", checkpoints" if row.get("checkpointing") else ""
    return (
        row["source"], row["model"], weights, f"{row['gpus']} {row['gpu']}", LAYOUTS.get(row["layout"], row["layout"]),
        row.get("precision", "bf16"), f"{row['batch']} x {row['tokens']:,}{ends}",
    )  # fmt: skip


COLUMNS = ("source", "model", "weights", "GPUs", "layout", "precision", "batch")


def _medians(rows: Iterable[tuple[str, float]]) -> list[str]:
    """By kind: how many, the median of the absolute errors, the median error and the worst."""
    by_kind: dict[str, list[float]] = {}
    for kind, error in rows:
        by_kind.setdefault(kind, []).append(error)
    lines = [
        (kind, len(errors), f"{statistics.median(map(abs, errors)):.1%}", f"{statistics.median(errors):+.1%}",
         f"{max(errors, key=abs):+.0%}")
        for kind, errors in by_kind.items()
    ]  # fmt: skip
    return table(("rows", "count", "median absolute error", "median error", "worst error"), lines)


def page(data: dict[str, Any]) -> list[str]:
    models, rows, timed = data["models"], data["others"], speeds(data)
    sizes = [(row, *one) for row in rows for one in memories(row, models)]
    found = [(row, *fits(row, models)) for row in rows if "fits" in row]
    right = sum(row["fits"] == planned for row, planned, _ in found)
    said = {True: "yes", False: "no"}
    kinds = [
        *((f"{WORDS[kind]}{', ' + STEADY if kind == 'reserved_gib' and row['source'] != 'ms-swift' else ''}"
           f"{', ms-swift' if row['source'] == 'ms-swift' else ''}", planned / published - 1)
          for row, kind, published, planned in sizes),
        *((f"speed, {row.cells[0]}", row.error) for row in timed),
    ]  # fmt: skip
    return [
        HEAD,
        *_medians(kinds),
        "\n### Memory of these\n\n\"Allocated\" is compared with the planned peak, \"reserved\" with a fifth more, and "
        "\"device\" with the context,\ntoo.\n",
        *table((*COLUMNS, "what", "published GiB", "planned", "error"),
               [(*_described(row), WORDS[kind], f"{published:.2f}", f"{planned:.2f}", f"{planned / published - 1:+.0%}")
                for row, kind, published, planned in sizes]),
        f"\n### What fits of these\n\n{right} of {len(found)} plans agree.\n",
        *table((*COLUMNS, "fits", "planned", "planned share of the usable memory"),
               [(*_described(row), said[row["fits"]], said[planned], f"{share:.0%}") for row, planned, share in found]),
        "\n### Speed of these\n",
        *table((*COLUMNS, "unit", "published", "planned", "error"), [(*row.cells, row.shown) for row in timed]),
        TAIL,
    ]  # fmt: skip
