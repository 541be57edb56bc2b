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

HORIZONTAL = 0.1  # share of a launch per tensor, if one kernel takes many (torch's foreach, on a GPU)
# Bytes per element besides the optimizer's own, in fp32: a norm reads gradients, clipping reads and writes them.
CLIP_BYTES = 12
# ZeRO takes norms in fp64 (zero/utils.py, get_norm_dtype: 20), joins and scales fp32 gradients, and writes the weights.
NORM_BYTES, SHARD_BYTES = 20, 24
STATE_BYTES = 12  # master weight and both moments, read from and written to disk


@dataclass(frozen=True)
class Update:
    """`work` on the device; `host`: seconds of an optimizer on the host, with its disk transfers."""

    work: Work = NOTHING
    host: float = 0.0


def update_of(job: Job, machine: Machine, kernels: Kernels, weights: Weights) -> Update:
    """The update of one rank. Gradients are clipped by default (the Trainer's max_grad_norm, 1.0)."""
    rule, ranks, count = KINDS[job.optimizer.kind], job.data_parallel_size, len(weights.trained)
    each = 1.0 if job.device == "cpu" else HORIZONTAL
    if job.engine in (TRAINER, FSDP) or job.zero.stage == 0:
        shards = [math.prod(piece(t.shape, ranks)) if job.engine == FSDP else t.elements for t in weights.trained]
        launches = rule.operators * (1 + each * (count - 1)) + 2 * each * count
        clipped = CLIP_BYTES * job.stepping.bytes_each / FP32_BYTES
        return Update(kernels.moved((job.stepping.moved + clipped) * sum(shards), launches))
    owned = sum(tensor.elements * tensor.holders for tensor in weights.trained) / ranks
    norms = count if job.zero.stage == 3 else count / ranks
    work = kernels.moved(NORM_BYTES * owned, 3 * norms)
    if job.zero.offload_optimizer != "none":
        return Update(work, _on_host(job, machine, owned, weights.bytes_each))
    groups = len(weights.sub_groups(ranks, job.zero.sub_group_size) if job.zero.stage == 3 else weights.groups())
    return Update(work + kernels.moved((SHARD_BYTES + rule.moved) * owned, (6 + rule.operators) * groups))


def _on_host(job: Job, machine: Machine, elements: float, size: int) -> float:
    """Seconds of CPU Adam at the node's rate, which its ranks share; of copying new weights to the device; and with
    NVMe of reading and writing the states."""
    here = min(job.ranks_per_node, job.world_size)
    seconds = elements * here / machine.cpu_adam_parameters_per_second
    seconds += elements * size / machine.host_link.bandwidth_bytes_per_second
    if job.zero.offload_optimizer == "nvme":
        moved = elements * here * STATE_BYTES
        seconds += moved / machine.nvme.bandwidth_read + moved / machine.nvme.bandwidth_write
    return seconds
