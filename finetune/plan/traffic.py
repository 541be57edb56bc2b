"""What ranks send each other in a step, and what is copied for it: DDP, FSDP, DeepSpeed's ZeRO-0 to -3, pipelines.

Modeled step by step on deepspeed 0.19.8, runtime/engine.py and runtime/zero/ (each place names its function), and
torch/csrc/distributed/c10d/reducer.cpp for DDP. `finetune.plan.engines.zero3` simulates the gathers of ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.plan import collectives
from finetune.plan.collectives import Group
from finetune.plan.engines.fsdp import Fsdp
from finetune.plan.engines.fsdp import Group as Sharded
from finetune.plan.engines.resident import Weights
from finetune.plan.engines.zero3 import gathers
from finetune.plan.engines.zero12 import Zero12
from finetune.plan.job import FSDP, TRAINER, Job
from finetune.plan.kernels import NOTHING, Kernels, Work
from finetune.plan.machine import Machine
from finetune.plan.step import Ledger
from finetune.plan.tape import Tape
from finetune.plan.values import FP32_BYTES

DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 2**20, 25 * 2**20  # torch.nn.parallel.DistributedDataParallel
INT8_BYTES, INT4_BYTES = 1.0, 0.5  # qwZ and qgZ send these (ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3)
# Host work of Python libraries, in units of eager launches, whose time scales alike across machines. Measured on
# MLPs of width 8 with 20 and 100 layers, whose steps are nothing else (one rank, torch 2.13, deepspeed 0.19.8).
DDP_PARAMETER = 1.5
ZERO12_PARAMETER = 3.0
ZERO12_BUCKET = 10.0
ZERO3_MODULE = 36.0  # hooks before and after a module with weights and its parents, in one direction
ZERO3_GATHER, ZERO3_GATHERED_PARAMETER = 20.0, 8.0
ZERO3_PARAMETER = 12.0  # per gradient


@dataclass(frozen=True)
class Flow:
    """`communication`: seconds of collectives, of which `tail` cannot start before the computation ends. `work`:
    copying for them; `offload`: seconds of transfers between host, disk and device."""

    communication: float = 0.0
    tail: float = 0.0
    work: Work = NOTHING
    offload: float = 0.0


STILL = Flow()


@dataclass(frozen=True)
class Traffic:
    """Flows of one micro-batch's forward pass, of its backward pass, of a step's last backward pass (`boundary`), and
    after it. All but one of a step's micro-batches add their gradients to earlier ones: that is in `backward`.
    `overlaps`: collectives run in parallel with the computation."""

    forward: Flow = STILL
    backward: Flow = STILL
    boundary: Flow = STILL
    step: Flow = STILL
    overlaps: bool = False


class Network:
    """Collectives among the ranks that share one stage's weights."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.machine, self.half = machine, job.weight_bytes < FP32_BYTES
        ranks = job.data_parallel_size
        self.group = Group(ranks, min(job.ranks_per_node, ranks))
        within = min(job.zero.hpz_ranks, ranks)
        self.secondary = Group(within, min(job.ranks_per_node, within))

    def all_reduce(self, size: float) -> float:
        return collectives.all_reduce(self.machine, size, self.group, self.half)

    def all_gather(self, size: float, secondary: bool = False) -> float:
        return collectives.all_gather(self.machine, size, self.secondary if secondary else self.group)

    def reduce_scatter(self, size: float, quantized: bool) -> float:
        if not quantized or self.group.nodes == 1:  # stage3.py, __avg_scatter_grads: qgZ needs several nodes
            return collectives.reduce_scatter(self.machine, size, self.group, self.half)
        near = Group(self.group.ranks_per_node, self.group.ranks_per_node)
        far = Group(self.group.nodes, 1)
        within = collectives.all_to_all(self.machine, size, near)
        return within + collectives.all_to_all(self.machine, size / near.ranks, far)


def traffic_of(job: Job, machine: Machine, kernels: Kernels, tape: Tape, weights: Weights) -> Traffic:
    """The traffic of one rank. Frozen parameters send no gradients."""
    network = Network(job, machine)
    if job.engine == FSDP:
        return _fsdp(job, kernels, network, tape, weights)
    if job.engine == TRAINER or job.zero.stage == 0:
        whole = Traffic(backward=_adding(kernels, weights))
        if network.group.ranks < 2:
            return whole
        return (_ddp if job.engine == TRAINER else _zero0)(job, kernels, network, weights, whole)
    if job.zero.stage == 3:
        return _zero3(job, kernels, network, tape, weights)
    return _zero12(job, kernels, network, weights)


def is_overlapping(job: Job, asked: bool) -> bool:
    """On a CPU collectives compete with the computation for cores, so they never overlap."""
    return asked and job.device != "cpu"


def _ddp(job: Job, kernels: Kernels, network: Network, weights: Weights, whole: Traffic) -> Traffic:
    """Gradients are copied into buckets of 25 MiB and back, and reduced during the backward pass, only in a step's last
    micro-batch (Trainer: `no_sync`)."""
    size = weights.bytes_each
    buckets = filled([t.elements * size for t in reversed(weights.trained)], DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES)
    sums = [network.all_reduce(sum(bucket)) for bucket in buckets]
    copied = _copies(kernels, [tensor.elements for tensor in weights.trained], 2, size)
    host = Work(0.0, DDP_PARAMETER * len(weights.trained))
    boundary = Flow(sum(sums), sums[-1], copied + host)
    return replace(whole, boundary=boundary, overlaps=is_overlapping(job, True))


def _fsdp(job: Job, kernels: Kernels, network: Network, tape: Tape, weights: Weights) -> Traffic:
    """Each group's weights are gathered in the forward pass and, except those that stay, again in the backward pass
    (engines/fsdp.py); its gradients are reduced only in a step's last micro-batch (accelerate 1.15, `no_sync`)."""
    size, ranks = weights.bytes_each, network.group.ranks
    engine = Fsdp(weights, job.zero, job.optimizer, ranks, 0, Ledger())
    engine.trace(tape)
    groups = [engine.groups[key] for key in engine.order]
    forward = _gathers(kernels, network, groups, size)
    again = _gathers(kernels, network, [group for group in reversed(groups) if not group.stays], size)
    sums = [network.reduce_scatter(group.trained * size, False) for group in reversed(groups)]
    moved = sum(kernels.moved("copy", (2 + 2 / ranks) * group.trained * size, size) for group in groups)
    work = again.work + Work(moved, ZERO3_PARAMETER * len(weights.trained))
    boundary = replace(again, communication=again.communication + sum(sums), tail=sums[-1], work=work)
    backward = replace(again, work=again.work + _adding(kernels, weights).work)
    return Traffic(forward, backward, boundary, overlaps=is_overlapping(job, True))


def _gathers(kernels: Kernels, network: Network, groups: Sequence[Sharded], size: int) -> Flow:
    """Shards into a flat tensor, and out of it into each parameter. Nothing overlaps with the first."""
    seconds = [network.all_gather(group.elements * size) for group in groups]
    share = 2 + 2 / network.group.ranks
    moved = sum(kernels.moved("copy", share * group.elements * size, size) for group in groups)
    host = ZERO3_GATHER * len(groups) + ZERO3_GATHERED_PARAMETER * sum(len(group.names) for group in groups)
    return Flow(sum(seconds), seconds[0] if seconds else 0.0, Work(moved, host))


def _zero0(job: Job, kernels: Kernels, network: Network, weights: Weights, whole: Traffic) -> Traffic:
    """engine.py, buffered_allreduce_fallback: after the last backward pass gradients are flattened, reduced, split."""
    size = weights.bytes_each
    work = _copies(kernels, [tensor.elements for tensor in weights.trained], 2, size)
    total = weights.trained_elements * size
    work += Work(kernels.moved("scale", 2 * total, size), 1)
    return replace(whole, step=Flow(network.all_reduce(total), work=work))


def _zero12(job: Job, kernels: Kernels, network: Network, weights: Weights) -> Traffic:
    """stage_1_and_2.py: a gradient is copied into the bucket (reduce_independent_p_g_buckets_and_remove_grads); a full
    bucket is divided and reduced over all ranks, with `reduce_scatter` in a flattened copy (allreduce_bucket, by
    use_multi_rank_bucket_allreduce); then this rank's part is copied out of it. After the optimizer, flat groups are
    gathered in place (all_gather_into_tensor_dp_groups). ZeRO-1 reduces in the last micro-batch only."""
    zero, size, ranks = job.zero, weights.bytes_each, network.group.ranks
    flat = Zero12(weights, zero, job.optimizer, ranks, 0, Ledger())
    sizes = [tensor.elements for tensor in reversed(weights.trained)]
    buckets = filled(sizes, zero.reduce_bucket_size)
    sums = [network.all_reduce(sum(bucket) * size) for bucket in buckets]
    host = Work(0.0, ZERO12_PARAMETER * len(sizes) + ZERO12_BUCKET * len(buckets))
    work = host + _copies(kernels, sizes, 1 if flat.contiguous else 0, size)
    for bucket in buckets:
        total = sum(bucket) * size
        work += Work(kernels.moved("scale", 2 * total, size), 1)
        if zero.reduce_scatter or not flat.contiguous:
            work += Work(kernels.moved("copy", 2 * total, size), 1)
    owned = flat.owned_elements * size
    work += Work(kernels.moved("copy", 2 * owned, size), len(sizes) / ranks)
    link = network.machine.host_link
    offload = owned / link.bandwidth_bytes_per_second if flat.offloads else 0.0
    adding = Work(kernels.moved("add", 3 * owned, size), len(sizes) / ranks)
    boundary = Flow(sum(sums), sums[-1] if sums else 0.0, work, offload)
    each = replace(boundary, work=work + adding) if zero.stage == 2 else _adding(kernels, weights)
    gathered = sum(network.all_gather(part.padded * size) for part in flat.parts)
    return Traffic(Flow(), each, boundary, Flow(gathered, gathered), is_overlapping(job, zero.overlap_comm))


def _zero3(job: Job, kernels: Kernels, network: Network, tape: Tape, weights: Weights) -> Traffic:
    """Gathers by module as the coordinator requests them, each assembled from shards and copied out
    (AllGatherCoalescedHandle.wait); gradients in buckets that are flattened, divided and reduce-scattered. After the
    optimizer each persistent parameter is gathered by a separate call (_post_step)."""
    zero, size, ranks = job.zero, weights.bytes_each, network.group.ranks
    played = gathers(tape, weights, zero, ranks)
    hosts, modules = Work(0.0, ZERO3_MODULE), len([op for op in tape.ops if op.module])
    sends = INT8_BYTES if zero.quantized_weights else size
    flows = []
    for phase in ("forward", "backward"):
        asked = [gather for gather in played.gathers if gather.phase == phase]
        work = hosts.times(modules)
        for gather in asked if ranks > 1 else ():
            # Shards into the flat tensor, and out of it into each parameter; quantized ones are dequantized first.
            moved = (2 + 2 / ranks) * gather.elements * size
            passes = 2 if zero.quantized_weights else 1
            work += Work(passes * kernels.moved("copy", moved, size), gather.parameters)
            work += Work(0.0, ZERO3_GATHER + ZERO3_GATHERED_PARAMETER * gather.parameters)
        secondary = zero.hpz_ranks > 1 and phase == "backward"
        seconds = [network.all_gather(gather.elements * sends, secondary) for gather in asked]
        flows.append(Flow(sum(seconds), seconds[0] if seconds else 0.0, work, _weights_read(job, network, weights)))
    forward, backward = flows
    for bucket in played.reduced:
        total = sum(bucket) * size
        copies = 2 * zero.contiguous_gradients + 2 * (len(bucket) > 1)
        work = Work(kernels.moved("copy", copies * total, size) + kernels.moved("scale", 2 * total, size), 3)
        work += Work(kernels.moved("copy", 2 * total / ranks, size), ZERO3_PARAMETER * len(bucket))
        sent = total * INT4_BYTES / size if zero.quantized_gradients and network.group.nodes > 1 else total
        seconds_sent = network.reduce_scatter(sent, zero.quantized_gradients)
        backward = replace(backward, communication=backward.communication + seconds_sent, tail=seconds_sent,
                           work=backward.work + work)  # fmt: skip
    piece = weights.trained_elements / ranks * size
    offload = piece / network.machine.host_link.bandwidth_bytes_per_second if zero.offload_optimizer != "none" else 0.0
    boundary = replace(backward, offload=backward.offload + offload)
    adding = Work(kernels.moved("add", 3 * piece, size), len(weights.trained))
    kept = [count * size for count in played.persistent] if ranks > 1 else []
    gathered = sum(map(network.all_gather, kept))
    step = Flow(gathered, gathered, Work(0.0, ZERO3_GATHERED_PARAMETER * len(kept)))
    backward = replace(backward, work=backward.work + adding)
    return Traffic(forward, backward, boundary, step, is_overlapping(job, zero.overlap_comm))


def _weights_read(job: Job, network: Network, weights: Weights) -> float:
    """Seconds to read offloaded weights once per forward or backward pass, from host memory or from disk."""
    piece = weights.elements / network.group.ranks * weights.bytes_each
    if job.zero.offload_param == "none":
        return 0.0
    seconds = piece / network.machine.host_link.bandwidth_bytes_per_second
    if job.zero.offload_param == "nvme":
        here = min(job.ranks_per_node, job.world_size)
        seconds += piece * here / network.machine.nvme.bandwidth_read
    return seconds


def filled(sizes: Sequence[int], limit: int, first: int | None = None) -> list[list[int]]:
    """Sizes in order, in buckets that are closed before they would exceed `limit`; `first`: that of the first."""
    buckets: list[list[int]] = []
    for size in sizes:
        most = first if first is not None and len(buckets) == 1 else limit
        if not buckets or sum(buckets[-1]) + size > most:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


def _copies(kernels: Kernels, elements: Sequence[int], passes: int, size: int) -> Work:
    """Each tensor read and written `passes` times, with one kernel each."""
    seconds = sum(kernels.moved("copy", 2 * count * size, size) for count in elements)
    return Work(passes * seconds, passes * len(elements))


def _adding(kernels: Kernels, weights: Weights) -> Flow:
    """Gradients of a later micro-batch are added to the existing ones."""
    size = weights.bytes_each
    seconds = sum(kernels.moved("add", 3 * tensor.elements * size, size) for tensor in weights.trained)
    return Flow(work=Work(seconds, len(weights.trained)))
