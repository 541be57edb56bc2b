"""Seconds of the end of a step: gradient norm, clipping, and the optimizer on a rank's share of the weights."""

from __future__ import annotations

import math
from dataclasses import replace

from finetune.plan.engines.fsdp import piece
from finetune.plan.engines.resident import Weights
from finetune.plan.job import DEEPSPEED, FSDP, TRAINER, Job
from finetune.plan.kernels import SIMPLE, Kernels, Work
from finetune.plan.machine import Machine
from finetune.plan.optimizers import KINDS
from finetune.plan.values import FP32_BYTES

HORIZONTAL = 0.1  # share of a launch per tensor, if one kernel takes many (torch's foreach, on a GPU)
# Bytes per element besides the optimizer's own, in fp32: a norm reads gradients, clipping reads and writes them.
CLIP_BYTES = 12
# In fp16 the Trainer's loss scaler reads and writes gradients (torch 2.13, amp/grad_scaler.py, unscale_); DeepSpeed
# looks for infinities with two reductions (0.19.8, runtime/utils.py, has_inf_or_nan).
SCALER_BYTES, SEARCH_BYTES = 8, 4
# DeepSpeed without ZeRO, in half precision (fp16/fused_optimizer.py, step): gradients become fp32, then flat, and the
# weights are written from fp32 ones. The host waits for its search of each tensor, of twelve operators. ZeRO-1 and -2
# add up what the search finds, and wait once (zero/stage_1_and_2.py, has_overflow).
FLAT_BYTES, SEARCH = 20, 12
# ZeRO takes norms in fp64 (zero/utils.py, get_norm_dtype: 20), joins and scales fp32 gradients, and writes the weights.
NORM_BYTES, SHARD_BYTES = 20, 24
STATE_BYTES = 12  # master weight and both moments, read from and written to disk


def update_of(job: Job, machine: Machine, kernels: Kernels, weights: Weights) -> Work:
    """The update of one rank. Gradients are clipped by default (the Trainer's max_grad_norm, 1.0)."""
    rule, ranks, count = KINDS[job.optimizer.kind], job.data_parallel_size, len(weights.trained)
    share, is_fp16 = 1.0 if job.device == "cpu" else HORIZONTAL, job.precision == "fp16"
    if job.engine in (TRAINER, FSDP) or job.zero.stage == 0:
        stepped = weights.trained if job.engine == DEEPSPEED else weights.with_gradients
        shards = [math.prod(piece(t.shape, ranks)) if job.engine == FSDP else t.elements for t in stepped]
        launches = rule.operators * (1 + share * (count - 1)) + 2 * share * count
        moved = job.stepping.moved + CLIP_BYTES * job.stepping.bytes_each / FP32_BYTES
        is_flat = job.engine == DEEPSPEED and job.precision != "fp32"
        moved += FLAT_BYTES + SEARCH_BYTES if is_flat else SCALER_BYTES * is_fp16
        work, each = kernels.moved(moved * sum(shards), launches), SIMPLE * count  # an operator's launches in a loop
        looped = rule.operators * each if rule.loops and job.device != "cpu" else 0.0
        if job.runs_ahead:
            return replace(work, launches=work.launches + looped)
        late = max(0.0, looped * machine.launch_seconds - work.device)  # no launch is ahead of the device
        return replace(work, host=SEARCH * each * machine.launch_seconds * is_flat + late)
    owned = sum(tensor.elements * tensor.holders for tensor in weights.trained) / ranks
    # ZeRO-1 and -2 search bf16, too (bf16.check_grad_overflow); ZeRO-3 only fp16, its flat buffer as a whole
    # (zero/stage3.py, _overflow_check_and_loss_scale_update). The constants of CPUs were fitted without.
    is_three = job.zero.stage == 3
    searches = job.device != "cpu" and (is_fp16 or (job.precision == "bf16" and not is_three))
    operators = (3 + (SEARCH + 1) * (searches and not is_three)) * (count if is_three else count / ranks)
    work = kernels.moved((NORM_BYTES + SEARCH_BYTES * searches) * owned, operators)
    work = replace(work, launches=kernels.simple * work.launches)
    if job.zero.offload_optimizer != "none":
        return replace(work, host=_on_host(job, machine, owned, weights.bytes_each))
    groups = len(weights.sub_groups(ranks, job.zero.sub_group_size) if job.zero.stage == 3 else weights.groups())
    return work + kernels.moved((SHARD_BYTES + rule.moved) * owned, (6 + rule.operators) * groups)


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
