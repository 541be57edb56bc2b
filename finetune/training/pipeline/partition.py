"""From flags to stages: measure the layers, cut the list, report the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.errors import RequestError
from finetune.models.pipeline import PipelineModel
from finetune.plan.schedule import bubble_share
from finetune.run.files import PIPELINE_RECORD
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.launch import Launch
from finetune.training.checkpoints.writing import by_first
from finetune.training.pipeline.checkpoint import read_record
from finetune.training.pipeline.costs import agreed, measure_layers, measure_transfer
from finetune.training.pipeline.stages import Cut, MemoryRule, check_cut, cut

USABLE_SHARE = 0.9  # of a GPU's memory: the rest goes to the CUDA context and fragmentation
# Bytes per parameter in DeepSpeed's engine. On every rank: the weight, its gradient, and the gradient sum over
# micro-batches. Sharded by ZeRO-1: the fp32 weight and Adam's two states (bf16_optimizer.py, zero/stage_1_and_2.py).
HELD_BYTES = {torch.float32: 4 + 4, torch.bfloat16: 2 + 2 + 4, torch.float16: 2 + 2}
SHARED_BYTES = 4 + 4 + 4


def partition(
    model: PipelineModel,
    arguments: PipelineArguments,
    training: Any,
    launch: Launch,
    dataset: Any,
    collator: Any,
    checkpoint_interval: int,
    checkpoint: str | None = None,
    offloads: bool = False,
) -> Cut:
    """The stages of the run. Every rank must call it; rank 0 decides for all. A run that resumes from `checkpoint` in
    the same layout keeps its stages: measurements differ between launches, and a norm summed over different stages
    rounds differently. `offloads`: activation checkpoints lie in host memory. Raises RequestError.
    """
    stages, method = arguments.pipeline_parallel_size or 1, arguments.partition_method
    micro_batches, device = training.gradient_accumulation_steps, training.device
    check_cut(model.layers, method, stages)
    dtype = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
    rows = [dataset[i % len(dataset)] for i in range(training.train_batch_size)]
    measured, like = measure_layers(model, collator(rows), device, dtype, checkpoint_interval > 0, offloads)
    costs = agreed(measured, device)
    transfer = measure_transfer(like, launch.world_size // stages, device) if stages > 1 else 0.0
    limit = None
    if device.type == "cuda":
        limit = int(torch.cuda.mem_get_info()[1] * USABLE_SHARE)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the measurement does not count toward the run's peak
    memory = MemoryRule(HELD_BYTES[dtype] + SHARED_BYTES * stages // launch.world_size, limit)

    def bounds() -> list[int]:
        saved = saved_bounds(checkpoint, method, stages, launch.world_size // stages, len(model.layers))
        return saved or cut(model.layers, costs, method, stages, micro_batches, memory)

    decided = by_first(bounds)
    return Cut(model.layers, costs, decided, micro_batches, transfer, method)


def saved_bounds(checkpoint: str | None, method: str, stages: int, pipelines: int, layers: int) -> list[int] | None:
    """The bounds used by the run that saved `checkpoint`; None if its method or layout was different. Raises
    RequestError."""
    if checkpoint is None or not (Path(checkpoint) / PIPELINE_RECORD).is_file():
        return None
    record = read_record(Path(checkpoint))
    if (record.get("partition_method"), record.get("stages"), record.get("pipelines")) != (method, stages, pipelines):
        return None
    bounds = record.get("bounds")
    numbers = bounds if isinstance(bounds, list) and all(type(bound) is int for bound in bounds) else []
    if [0, *sorted(set(numbers[1:-1]) & set(range(1, layers))), layers] == numbers and len(numbers) == stages + 1:
        return numbers
    raise RequestError(f"{checkpoint}: {PIPELINE_RECORD} cuts {layers} layers in {stages} stages at {bounds}.")


def describe(parts: Cut) -> list[str]:
    """Lines to print at the start: the stages, and how much of their time a step can use."""
    stages, micro_batches = parts.stages, parts.micro_batches
    full = 1 - bubble_share(stages, micro_batches)
    planned = parts.plan()
    lines = [
        *parts.table(),
        f"estimate from the layers alone: {planned.makespan * 1e3:.0f} ms for {micro_batches} micro-batches a step; at "
        f"best {micro_batches}/({micro_batches}+{stages}-1) x balance = {full:.0%} x {parts.balance:.2f} "
        f"= {full * parts.balance:.0%} of the stages' time is work",
    ]
    if micro_batches < stages:
        lines.append(
            f"warning: --gradient_accumulation_steps {micro_batches} is less than the {stages} stages: {1 - full:.0%} "
            f"of their time is lost to waiting. Raise it to about {4 * stages}; --per_device_train_batch_size can be "
            "lowered to compensate."
        )
    return lines
