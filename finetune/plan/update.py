"""Seconds of the end of a step: gradient norm, clipping, and the optimizer on a rank's share of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune.plan.engines.fsdp import piece
from finetune.plan.engines.resident import Weights
from finetune.plan.job import FSDP, TRAINER, Job
from finetune.plan.kernels import NOTHING, Kernels, Work
from finetune.plan.machine import Machine
from finetune.plan.optimizers import KINDS
from finetune.plan.values import FP32_BYTES
from finetune.plan.zero import shard

HORIZONTAL = 0.1  # share of a launch per tensor, if one kernel takes many (torch's foreach, on a GPU)
DOUBLE_NORM_BYTES = 20  # per gradient element: read, written in fp64, and read (zero/utils.py, get_norm_dtype)
STATE_BYTES = 12  # master weight and both moments, read from and written to disk


@dataclass(frozen=True)
class Update:
    """`work` on the device; `host`: seconds of an optimizer on the host, with its disk transfers."""

    work: Work = NOTHING
    host: float = 0.0


def update_of(job: Job, machine: Machine, kernels: Kernels, weights: Weights) -> Update:
    """The update of one rank. The Trainer clips by default (max_grad_norm 1.0)."""
    tensors = [tensor.elements for tensor in weights.trained]
    if job.engine == FSDP:
        tensors = [math.prod(piece(tensor.shape, job.data_parallel_size)) for tensor in weights.trained]
    if job.engine == FSDP or job.engine == TRAINER or job.zero.stage == 0:
        return Update(_whole(job, kernels, weights, tensors))
    parts, pieces = _share(job, weights)
    size, offloads = weights.bytes_each, job.zero.offload_optimizer != "none"
    norm = sum(kernels.moved("norm_double", DOUBLE_NORM_BYTES * count) for count in pieces)
    work = Work(norm, 3 * len(pieces))
    if offloads:
        return Update(work, _on_host(job, machine, sum(parts), size))
    for part in parts:
        joined = kernels.moved("copy", 2 * part * size, size) + kernels.moved("scale", 2 * part * FP32_BYTES)
        if size < FP32_BYTES:
            joined += kernels.moved("cast", part * (size + FP32_BYTES))
        back = kernels.moved("cast" if size < FP32_BYTES else "copy", part * (size + FP32_BYTES), size)
        work += Work(joined + back, 6) + _stepped(job, kernels, [part])
    return Update(work)


def _whole(job: Job, kernels: Kernels, weights: Weights, tensors: list[int]) -> Work:
    """Every rank does the same with every tensor, or with its shards."""
    work = _stepped(job, kernels, tensors)
    each = 1.0 if job.device == "cpu" else HORIZONTAL
    if job.engine in (TRAINER, FSDP) or job.zero.gradient_clipping:
        seconds = sum(kernels.moved("norm", FP32_BYTES * n) + kernels.moved("scale", 8 * n) for n in tensors)
        work += Work(seconds, 2 * each * len(tensors))
    if weights.bytes_each < FP32_BYTES and job.engine not in (
        TRAINER,
        FSDP,
    ):  # gradients to fp32, and new weights from it
        seconds = sum(2 * kernels.moved("cast", n * (weights.bytes_each + FP32_BYTES)) for n in tensors)
        work += Work(seconds, 2 * len(tensors))
    return work


def _stepped(job: Job, kernels: Kernels, tensors: list[int]) -> Work:
    rule = KINDS[job.optimizer.kind]
    seconds = sum(kernels.moved(job.optimizer.kind, rule.moved * count) for count in tensors)
    each = 1.0 if job.device == "cpu" else HORIZONTAL
    return Work(seconds, rule.operators * (1 + each * (len(tensors) - 1)))


def _share(job: Job, weights: Weights) -> tuple[list[int], list[int]]:
    """Elements of each tensor that one rank's optimizer steps, and of each gradient whose norm it takes."""
    ranks = job.data_parallel_size
    if job.zero.stage == 3:
        pieces = [shard(tensor.elements, ranks) for tensor in weights.trained]
        return weights.sub_groups(ranks, job.zero.sub_group_size), pieces
    parts = [part.part for part in weights.parts(ranks)]
    several = max(1, len(weights.trained) // ranks)
    return parts, [max(1, sum(parts) // several)] * several


def _on_host(job: Job, machine: Machine, elements: int, size: int) -> float:
    """Seconds of CPU Adam at the node's rate, which its ranks share; of copying new weights to the device; and with
    NVMe of reading and writing the states."""
    here = min(job.ranks_per_node, job.world_size)
    seconds = elements * here / machine.cpu_adam_parameters_per_second
    seconds += elements * size / machine.host_link.bandwidth_bytes_per_second
    if job.zero.offload_optimizer == "nvme":
        moved = elements * here * STATE_BYTES
        seconds += moved / machine.nvme.bandwidth_read + moved / machine.nvme.bandwidth_write
    return seconds
