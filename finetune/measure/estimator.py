"""DeepSpeed's own estimators beside the plan. They derive weights, gradients and states from the number of parameters,
in 16-bit mixed precision; the plan simulates a step."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace

import torch

from finetune.errors import RequestError
from finetune.plan.job import Job
from finetune.plan.machine import Machine
from finetune.plan.plan import plan
from finetune.plan.search import laid_out

GIB = 2**30
LAYOUTS = ("zero2", "zero2_offload", "zero3", "zero3_offload")


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU, and on a node's host: from DeepSpeed, and from the plan between steps and at the peak."""

    layout: str
    their_gpu: int
    their_host: int
    at_rest: int
    at_peak: int
    host: int


def largest_layer(job: Job) -> int:
    """Elements of the module that directly holds the most (deepspeed 0.19.8, runtime/zero/stage3.py,
    model_to_params)."""
    modules = Counter[str]()
    for tensor in job.model.tensors:
        modules[tensor.name.rpartition(".")[0]] += tensor.elements
    return max(modules.values())


def estimates(job: Job, machine: Machine) -> list[Estimate]:
    """Estimates for the job's model and ranks under ZeRO-2 and ZeRO-3, with and without offload. Raises
    RequestError."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns if it has to detect this
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as of_zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as of_zero2

    if job.stages > 1:
        raise RequestError("--estimator: DeepSpeed has none for pipelines. Drop it, or --pipeline_parallel_size.")
    total, largest = job.model.parameters, largest_layer(job)
    here = min(job.world_size, job.ranks_per_node)
    nodes, found = -(-job.world_size // here), []
    for layout in LAYOUTS:
        one = laid_out(replace(job, eval_batch=0), layout)
        away = {"num_gpus_per_node": here, "num_nodes": nodes, "cpu_offload": one.zero.offload_optimizer != "none"}
        if one.zero.stage == 3:
            host, gpu, _ = of_zero3(total, largest, **away, cpu_offload_params=one.zero.offload_param != "none")
        else:
            host, gpu = of_zero2(total, **away)
        ours = plan(one, machine)
        rest = max(rank.resident_bytes for rank in ours.ranks)
        found.append(Estimate(layout, gpu, host, rest, ours.peak_bytes, ours.host_bytes))
    return found


def show(job: Job, machine: Machine) -> int:
    found = estimates(job, machine)
    print(f"{job.model.family}, {job.model.parameters:,} parameters, {job.precision}, {job.world_size:,} ranks; in GiB")
    print(f"{'':16}{'a GPU':>12}{'':24}{'a host':>12}")
    print(f"{'':16}{'DeepSpeed':>12}{'at rest':>12}{'at peak':>12}{'DeepSpeed':>12}{'planned':>12}")
    for one in found:
        sizes = (one.their_gpu, one.at_rest, one.at_peak, one.their_host, one.host)
        print(f"{one.layout:16}" + "".join(f"{size / GIB:12,.2f}" for size in sizes))
    print(
        "DeepSpeed's estimators use only the number of parameters: they ignore activations, batches and buckets, and "
        "leave room on the host for each rank to load the whole model."
    )
    return 0
