"""A job on a machine, planned: memory of each kind of rank, time of a step, and whether it fits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.plan.engines.resident import PARAMETERS
from finetune.plan.job import FSDP, PIPELINE, TRAINER, Job
from finetune.plan.machine import Machine
from finetune.plan.memory import COPIED, SAVED, RankMemory, plan_memory
from finetune.plan.seconds import StepSeconds, plan_seconds
from finetune.plan.values import FP32_BYTES

# What torch's allocator keeps beyond its peak, as a share of it: freed blocks that fit nothing else. Fitted to what
# fms-acceleration published of both on one A100 (docs/results/plan_public.md). The allocator returns these blocks
# before it runs out of memory, so they do not count against what fits.
RESERVED = 0.2


@dataclass(frozen=True)
class Plan:
    """`ranks` has one of each kind: the first and the last data-parallel rank, or one of each pipeline stage."""

    job: Job
    machine: Machine
    ranks: tuple[RankMemory, ...]
    seconds: StepSeconds

    @property
    def limit_bytes(self) -> int:
        return self.machine.usable_bytes

    @property
    def host_limit_bytes(self) -> int:
        return self.machine.host_memory_bytes

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.peak.bytes)

    @property
    def peak_bytes(self) -> int:
        return self.fullest.peak.bytes

    @property
    def device_bytes(self) -> int:
        return shown_bytes(self.machine, self.peak_bytes)

    @property
    def host(self) -> dict[str, int]:
        return host_of_node(self.job, self.ranks)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def why_not(self) -> str | None:
        """What is too much: for the device of a kind of rank, or for a node's host; None if it fits."""
        if self.peak_bytes > self.limit_bytes:
            return f"needs {_gib(self.peak_bytes)} of {_gib(self.limit_bytes)} GiB"
        if self.host_bytes > self.host_limit_bytes:
            return f"needs {_gib(self.host_bytes)} GiB of host memory per node, of {_gib(self.host_limit_bytes)}"
        return None

    @property
    def fits(self) -> bool:
        return self.why_not is None


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"


def shown_bytes(machine: Machine, peak_bytes: int) -> int:
    """What nvidia-smi shows for a process with this peak: its context, and what the allocator has reserved."""
    return min(machine.memory_bytes, machine.context_bytes + int((1 + RESERVED) * peak_bytes))


def host_of_node(job: Job, ranks: Sequence[RankMemory]) -> dict[str, int]:
    """Host bytes by kind on the fullest node: what each of its ranks holds, on CPUs at its peak, and the weights while
    they are saved, which the first rank of each stage gathers. Ranks are numbered stage by stage."""
    saved, weights = Counter[int](), Counter[int]()
    for stage in range(job.stages):
        node = stage * job.data_parallel_size // job.ranks_per_node
        saved[node] += ranks[stage].saving_host_bytes
        weights[node] += ranks[stage].resident.get(PARAMETERS, 0)
    held = _held_on_node(job, ranks) | {SAVED: max(saved.values())}
    share = max(weights.values()) / weights.total() if job.stages > 1 else 1.0
    return held | ({COPIED: copied_bytes(job, share)} if is_saved_beside(job) else {})


def _held_on_node(job: Job, ranks: Sequence[RankMemory]) -> dict[str, int]:
    """Host bytes by kind that the ranks of the fullest node hold. On CPUs that is all that they have, and the stages of
    a pipeline differ."""
    if job.engine == PIPELINE and job.device == "cpu":
        nodes = defaultdict[int, Counter[str]](Counter)
        for rank in range(job.world_size):
            nodes[rank // job.ranks_per_node].update(ranks[rank // job.data_parallel_size].peak.by_kind)
        fullest = max(nodes.values(), key=Counter.total)
        return dict(fullest)
    each = [rank.peak.by_kind if job.device == "cpu" else rank.host for rank in ranks]
    here, most = min(job.world_size, job.ranks_per_node), max(each, key=lambda held: sum(held.values()))
    return {kind: here * size for kind, size in most.items()}


def is_saved_beside(job: Job) -> bool:
    """Whether a checkpoint is large enough to be saved asynchronously."""
    if job.saves_beside_from is None:
        return False
    weights, states = _saved_bytes(job)
    is_twice = job.engine == FSDP or (job.engine not in (TRAINER, PIPELINE) and job.zero.stage < 3)
    return (2 if is_twice else 1) * weights + states >= job.saves_beside_from


def copied_bytes(job: Job, share: float = 1.0) -> int:
    """Bytes that an asynchronous save copies on the node of rank 0: the weights, once even if two files need them, and
    optimizer states and masters, of which from ZeRO-1 each node has its part. FSDP writes its shards synchronously.
    The first rank of a pipeline's stage copies all of the stage; `share` is that of the stages that begin on the
    fullest node."""
    weights, states = _saved_bytes(job)
    if job.engine == FSDP:
        return weights
    if job.engine == PIPELINE:
        return int(share * (weights + states))
    if job.engine == TRAINER or job.zero.stage == 0:
        return weights + states
    return weights + int(states * min(job.ranks_per_node, job.world_size) / job.world_size)


def _saved_bytes(job: Job) -> tuple[int, int]:
    """Bytes of what a checkpoint holds, over all ranks: weights, of which only an adapter leaves out the frozen ones,
    and which FSDP and DeepSpeed below ZeRO-3 save a second time in files of their own; and optimizer states, with
    DeepSpeed's masters. A pipeline saves the masters alone, as its weights."""
    trained = [tensor for tensor in job.model.tensors if tensor.trains]
    elements = sum(tensor.elements for tensor in trained)
    saved = elements if job.model.lora is not None else job.model.parameters
    states = sum(job.stepping.state_bytes(tensor.shape) for tensor in trained)
    if job.engine == PIPELINE:
        return FP32_BYTES * saved, states
    states += 0 if job.engine in (FSDP, TRAINER) else FP32_BYTES * elements
    return job.weight_bytes * saved, states


def fullness(job: Job, machine: Machine) -> float:
    """The used share of the device or of the host, whichever is larger; above 1 the job does not fit."""
    device, ranks = 0.0, list[RankMemory]()
    for rank in kinds_of_rank(job):
        ranks.append(plan_memory(job, machine, rank))
        device = max(device, ranks[-1].peak.bytes / machine.usable_bytes)
        if device > 1:
            return device  # the other ranks cannot change that
    return max(device, sum(host_of_node(job, ranks).values()) / machine.host_memory_bytes)


def kinds_of_rank(job: Job) -> list[int]:
    """The stages of a pipeline; else the first rank and the last, whose shard may hold padding."""
    return list(range(job.stages)) if job.engine == PIPELINE else sorted({0, job.data_parallel_size - 1})


def plan(job: Job, machine: Machine) -> Plan:
    memory = tuple(plan_memory(job, machine, rank) for rank in kinds_of_rank(job))
    return Plan(job, machine, memory, plan_seconds(job, machine))
