"""What ranks send each other in a step, and what is copied for it: DDP, FSDP, DeepSpeed's ZeRO-0 to -3, pipelines.

Follows deepspeed 0.19.8, runtime/engine.py and runtime/zero/ (each place names its function), and
torch/csrc/distributed/c10d/reducer.cpp for DDP. `finetune.plan.engines.zero3` simulates the gathers of ZeRO-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.plan.collectives import Group, all_gather, all_reduce, reduce_scatter
from finetune.plan.engines.fsdp import Fsdp
from finetune.plan.engines.resident import Weights
from finetune.plan.engines.zero3 import played
from finetune.plan.job import FSDP, TRAINER, Job
from finetune.plan.kernels import NOTHING, Kernels, Work
from finetune.plan.machine import Machine
from finetune.plan.step import Ledger
from finetune.plan.tape import Tape

DDP_BUCKET_BYTES = 25 * 2**20  # torch.nn.parallel.DistributedDataParallel
INT8_BYTES, INT4_BYTES = 1.0, 0.5  # qwZ and qgZ send these (ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3)
# Host work of Python libraries, in units of eager launches, whose time scales alike across machines. Measured on
# MLPs of width 8 with 20 and 100 layers, whose steps are nothing else (one rank, torch 2.13, deepspeed 0.19.8).
DDP_PARAMETER, ZERO12_PARAMETER = 1.5, 3.0  # hooks, per gradient
ZERO3_MODULE = 36.0  # hooks before and after a module with weights and its parents, in one direction
GATHER = 20.0
SHARDED_PARAMETER = 10.0  # that is gathered, or whose gradient is scattered


@dataclass(frozen=True)
class Flow:
    """`communication`: seconds of collectives, of which `tail` cannot start before the computation ends. `work`:
    copying for them; `offload`: seconds of transfers between host, disk and device."""

    communication: float = 0.0
    tail: float = 0.0
    work: Work = NOTHING
    offload: float = 0.0

    def __add__(self, later: Flow) -> Flow:
        return Flow(
            self.communication + later.communication,
            later.tail or self.tail,
            self.work + later.work,
            self.offload + later.offload,
        )


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


def traffic_of(job: Job, machine: Machine, kernels: Kernels, tape: Tape, weights: Weights) -> Traffic:
    """The traffic of one rank. Frozen parameters send no gradients."""
    network = Network(job, machine, kernels, weights)
    if job.engine == FSDP:
        return network.fsdp(tape)
    if job.engine != TRAINER and job.zero.stage == 3:
        return network.zero3(tape)
    if job.engine != TRAINER and job.zero.stage:
        return network.zero12()
    return network.whole()


class Network:
    """Collectives among the ranks that share one stage's weights, and the copies that they take."""

    def __init__(self, job: Job, machine: Machine, kernels: Kernels, weights: Weights) -> None:
        self.job, self.machine, self.kernels, self.weights = job, machine, kernels, weights
        self.zero, self.ranks, self.size = job.zero, job.data_parallel_size, weights.bytes_each
        self.is_on_gpu = job.device != "cpu"  # else collectives compete with the computation for cores: none overlaps
        self.group = Group(self.ranks, min(job.ranks_per_node, self.ranks))
        between = job.expert_parallel_size  # ranks that hold the same experts are so far apart
        self.of_experts = Group(self.ranks // between, max(self.group.ranks_per_node // between, 1))
        self.count, self.gradients = len(weights.trained), weights.trained_elements * self.size

    def sent(
        self, collective: Callable[[Machine, float, Group], float], size: float, calls: int, group: Group | None = None
    ) -> Flow:
        """`size` bytes in equal `calls`."""
        each = collective(self.machine, size / calls, group or self.group) if calls else 0.0
        return Flow(calls * each, each)

    def copied(self, size: float, tensors: float, launches: float = 0.0) -> Flow:
        """`size` bytes moved, with a kernel for each tensor, and hooks as long as so many `launches`."""
        moved = self.kernels.moved(size, tensors)
        return Flow(work=Work(moved.device, self.kernels.simple * tensors) + self.hooks(launches))

    def hooks(self, launches: float) -> Work:
        return Work(0.0, self.kernels.python * launches)

    def added(self, share: int = 1) -> Flow:
        """Gradients of a later micro-batch are added to the existing ones."""
        return self.copied(3 * self.gradients / share, self.count / share)

    def to_host(self) -> Flow:
        """This rank's gradients, for an optimizer there."""
        if self.zero.offload_optimizer == "none":
            return STILL
        return Flow(offload=self.gradients / self.ranks / self.machine.host_link.bandwidth_bytes_per_second)

    # Whole weights on every rank

    def whole(self) -> Traffic:
        """DDP copies gradients into buckets, and reduces them there during the backward pass, in a step's last
        micro-batch (Trainer: `no_sync`). ZeRO-0 flattens, reduces, and splits them after it (engine.py,
        buffered_allreduce_fallback)."""
        if self.ranks < 2 or not self.gradients:
            return Traffic(backward=self.added())
        if self.job.engine != TRAINER:
            step = self.sent(all_reduce, self.gradients, 1) + self.copied(6 * self.gradients, 2 * self.count)
            return Traffic(backward=self.added(), step=step)
        boundary = self.sent(all_reduce, self.gradients, math.ceil(self.gradients / DDP_BUCKET_BYTES))
        boundary += self.copied(2 * self.gradients, self.count, DDP_PARAMETER * self.count)
        return Traffic(backward=self.added(), boundary=boundary, overlaps=self.is_on_gpu)

    def zero12(self) -> Traffic:
        """stage_1_and_2.py: gradients are copied into buckets (reduce_independent_p_g_buckets_and_remove_grads), each
        of which is divided, flattened and reduced over all ranks, experts over those that hold the same
        (allreduce_bucket); this rank's part is copied out. After the optimizer, flat groups are gathered. ZeRO-1
        reduces in the last micro-batch only."""
        apart = sum(tensor.elements for tensor in self.weights.trained if tensor.holders > 1)
        boundary = self.reduced(self.weights.trained_elements - apart) + self.reduced(apart, self.of_experts)
        moved = (6 + 2 / self.ranks) * self.gradients
        boundary += self.copied(moved, (1 + 1 / self.ranks) * self.count, ZERO12_PARAMETER * self.count)
        boundary += self.to_host()
        each = boundary + self.added(self.ranks) if self.zero.stage == 2 else self.added()
        groups = len(self.weights.groups()) - bool(apart)
        step = self.sent(all_gather, self.gradients - apart * self.size, groups)
        step += self.sent(all_gather, apart * self.size, bool(apart), self.of_experts)
        return Traffic(STILL, each, boundary, step, self.is_on_gpu and self.zero.overlap_comm)

    def reduced(self, elements: int, group: Group | None = None) -> Flow:
        """Gradients in buckets."""
        buckets = math.ceil(elements / self.zero.reduce_bucket_size)
        return self.sent(all_reduce, elements * self.size, buckets, group)

    # Shards

    def fsdp(self, tape: Tape) -> Traffic:
        """Each group's weights are gathered in the forward pass and, except those that stay, again in the backward pass
        (engines/fsdp.py); its gradients are reduced only in a step's last micro-batch (accelerate 1.15, `no_sync`)."""
        engine = Fsdp(self.weights, self.zero, self.job.optimizer, self.ranks, 0, Ledger())
        engine.trace(tape)
        groups = engine.groups.values()
        forward = self.gathered([(group.elements, len(group.names)) for group in groups])
        again = self.gathered([(group.elements, len(group.names)) for group in groups if not group.stays])
        boundary = again + self.scattered(len([group for group in groups if group.trained]), 2)
        return Traffic(forward, again + self.added(), boundary, overlaps=self.is_on_gpu)

    def zero3(self, tape: Tape) -> Traffic:
        """Gathers by module as the coordinator requests them, and buckets of gradients. After the optimizer each
        persistent parameter is gathered by a separate call (_post_step)."""
        engine = played(tape, self.weights, self.zero, self.ranks)
        hooks = Flow(work=self.hooks(ZERO3_MODULE * len([op for op in tape.ops if op.module])))
        forward, backward = (
            hooks + self.read() + self.gathered(engine.gathers[phase], phase) for phase in ("forward", "backward")
        )
        backward += self.scattered(engine.reduced, 6)
        boundary = backward + self.to_host()
        kept = [engine.elements[name] for name in engine.persistent] if self.ranks > 1 else []
        step = self.sent(all_gather, sum(kept) * self.size, len(kept))
        step += Flow(work=self.hooks(SHARDED_PARAMETER * len(kept)))
        each = backward + self.added(self.ranks)
        return Traffic(forward, each, boundary, step, self.is_on_gpu and self.zero.overlap_comm)

    def gathered(self, asked: Sequence[tuple[int, int]], phase: str = "") -> Flow:
        """Elements and parameters of each gather: assembled from shards, and copied out into each parameter
        (AllGatherCoalescedHandle.wait)."""
        if self.ranks < 2:
            return STILL
        elements, parameters = (sum(one[index] for one in asked) for index in (0, 1))
        within = min(self.zero.hpz_ranks, self.ranks) if phase == "backward" else 1  # a secondary shard, hpZ's
        group = Group(within, min(self.job.ranks_per_node, within)) if within > 1 else self.group
        sends = INT8_BYTES if self.zero.quantized_weights else self.size
        moved = (2 + 2 / self.ranks) * elements * self.size
        flow = self.copied(moved, parameters, SHARDED_PARAMETER * parameters + GATHER * len(asked))
        return flow + self.sent(all_gather, elements * sends, len(asked), group)

    def scattered(self, calls: int, passes: int) -> Flow:
        """Gradients in buckets, over which a rank passes so often (read or written), are reduced, and its shards copied
        out. qgZ sends fewer bytes, between nodes alone (stage3.py, __avg_scatter_grads)."""
        is_quantized = self.zero.quantized_gradients and self.group.nodes > 1
        sends = INT4_BYTES / self.size if is_quantized else 1.0
        moved = (passes + 2 / self.ranks) * self.gradients
        flow = self.copied(moved, self.count, SHARDED_PARAMETER * self.count)
        return flow + self.sent(reduce_scatter, sends * self.gradients, calls)

    def read(self) -> Flow:
        """Offloaded weights, once per forward or backward pass, from host memory or from disk."""
        if self.zero.offload_param == "none":
            return STILL
        piece = self.weights.elements / self.ranks * self.size
        seconds = piece / self.machine.host_link.bandwidth_bytes_per_second
        if self.zero.offload_param == "nvme":
            here = min(self.job.ranks_per_node, self.job.world_size)
            seconds += piece * here / self.machine.nvme.bandwidth_read
        return Flow(offload=seconds)
