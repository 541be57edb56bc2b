"""How long a training step takes, by part: a sum over a tape's operators, collectives, copies and launches.

    step = plan_seconds(job, find_machine("H100"))
    step.total, step.tokens_per_second, step.mfu

On a GPU the host runs ahead: a part of a step lasts as long as the device works or as the host needs to launch it,
whichever is longer, and `launch` is what the host adds. On a CPU every launch adds its time. Collectives that overlap
with computation cost only what is not hidden (`exposed_communication`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from finetune.plan.collectives import p2p
from finetune.plan.engines.resident import Weights
from finetune.plan.job import PIPELINE, Job, layers_of, tape_of
from finetune.plan.kernels import NOTHING, Work, kernels_of
from finetune.plan.machine import Machine
from finetune.plan.partition import balanced_bounds
from finetune.plan.schedule import Schedule, simulate
from finetune.plan.segments import SegmentWork, passed
from finetune.plan.tape import Tape
from finetune.plan.traffic import Flow, Traffic, traffic_of
from finetune.plan.update import update_of

# The loop's own work (callbacks, schedule, collating) in eager launches, per step and micro-batch: MLPs of width 8.
STEP_LAUNCHES, MICRO_BATCH_LAUNCHES = 150.0, 60.0
# Fields of StepSeconds, in this order.
PARTS = ("forward", "backward", "recomputation", "copies", "optimizer", "exposed_communication", "offload", "loop",
         "launch", "idle")  # fmt: skip


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step on the slowest rank of a job. `recomputation`: of checkpointed layers; `copies`:
    into and out of buckets; `idle`: a pipeline's waiting and sending; `loop`: the training loop's own work (collating
    batches, callbacks, the schedule). `communication`: all collectives; only its unhidden part,
    `exposed_communication`, is in `total`."""

    forward: float
    backward: float
    recomputation: float
    copies: float
    optimizer: float
    communication: float
    exposed_communication: float
    offload: float
    loop: float
    launch: float
    idle: float
    samples: int  # over all ranks
    tokens: int
    model_flops: float  # forward and backward of one step over all ranks; recomputation is not counted
    peak_flops: float  # of all ranks together

    @property
    def parts(self) -> dict[str, float]:
        """The terms of `total`."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311, appendix B)."""
        return self.model_flops / (self.total * self.peak_flops)


@lru_cache(maxsize=16)
def shared(machine: Machine, ranks: int) -> Machine:
    """A CPU's profile, measured with `ranks_per_node` ranks, as seen by each of `ranks`. Launches take one thread."""
    times = machine.ranks_per_node / ranks if ranks else 1.0
    if times == 1 or machine.device != "cpu":
        return machine
    return replace(
        machine,
        peak_flops={kind: times * peak for kind, peak in machine.peak_flops.items()},
        memory_bandwidth=times * machine.memory_bandwidth,
        gemm_table=tuple((*row[:4], times * row[4]) for row in machine.gemm_table),
        kernel_table=tuple((*row[:3], times * row[3]) for row in machine.kernel_table),
    )


def plan_seconds(job: Job, machine: Machine) -> StepSeconds:
    """For a step after warm-up."""
    machine = shared(machine, min(job.world_size, job.ranks_per_node) if job.device == "cpu" else 0)
    if job.engine == PIPELINE:
        return _pipeline(job, machine)
    kernels = kernels_of(machine, job.precision)
    segments = _segments(job, machine)
    weights = Weights(job.model.tensors, job.weight_bytes)
    traffic = traffic_of(job, machine, kernels, _tape(job), weights)
    forward, backward, again = (
        sum((getattr(segment, part) for segment in segments), NOTHING) for part in ("forward", "backward", "again")
    )
    micros = job.accumulation
    flows = (
        (traffic.forward, forward.times(micros), micros),
        (traffic.backward, (backward + again).times(micros - 1), micros - 1),
        (traffic.boundary, backward + again, 1),
    )
    update = update_of(job, machine, kernels, weights)
    copies = sum((flow.work.times(count) for flow, _, count in flows), traffic.step.work)
    exposed = offload = 0.0
    for flow, beside, count in flows:
        waited = _exposed(flow, beside, count, traffic.overlaps)
        exposed += waited
        offload += _sticking_out(flow, beside.device + waited, count, job)
    beside = _asked(job, machine).times(micros)
    work = sum((work for _, work, _ in flows), copies + update.work + beside)
    return _step(job, machine, segments, {
        "forward": forward.device * micros + beside.device,
        "backward": backward.device * micros,
        "recomputation": again.device * micros,
        "copies": copies.device,
        "optimizer": update.work.device + update.host,
        "communication": sum(flow.communication * count for flow, _, count in flows) + traffic.step.communication,
        "exposed_communication": exposed + traffic.step.communication,
        "offload": offload,
        "launch": _launch(machine, work.launches, work.device + exposed + offload),
        "idle": 0.0,
    })  # fmt: skip


def _asked(job: Job, machine: Machine) -> Work:
    """Forward passes of a micro-batch without gradients: a teacher's or a reference's, and for KTO's baseline the
    model's and its reference's once more. What ZeRO-3 gathers for them is not counted."""
    once = _forward(job.of_teacher, machine) if job.teacher is not None else NOTHING
    return once.times(2) + _forward(job, machine) if job.baseline else once


def _forward(job: Job, machine: Machine) -> Work:
    return sum((segment.forward for segment in _segments(job, machine)), NOTHING)


def _step(job: Job, machine: Machine, segments: Sequence[SegmentWork], seconds: dict[str, float]) -> StepSeconds:
    """`seconds`: by part, as summed over single operators."""
    loop = (STEP_LAUNCHES + MICRO_BATCH_LAUNCHES * job.accumulation) * machine.launch_seconds
    flops = sum(segment.flops for segment in segments) * job.accumulation * job.data_parallel_size
    precision = job.precision if job.precision in machine.peak_flops else "fp32"
    return StepSeconds(
        **{name: machine.step_factor * part for name, part in {**seconds, "loop": loop}.items()},
        samples=job.global_batch,
        tokens=job.global_batch * job.sample_tokens,
        model_flops=flops,
        peak_flops=machine.peak_flops[precision] * job.world_size,
    )


def _launch(machine: Machine, launches: float, device: float) -> float:
    host = launches * machine.launch_seconds
    return host if machine.device == "cpu" else max(0.0, host - device)


def _exposed(flow: Flow, work: Work, count: int, overlaps: bool) -> float:
    """Exposed communication of `count` micro-batches whose computation is `work` in total."""
    communication = flow.communication * count
    if not overlaps:
        return communication
    return max(flow.tail * count, communication - work.device)


def _sticking_out(flow: Flow, lasts: float, count: int, job: Job) -> float:
    """Exposed transfers to and from the host, which on a GPU overlap with `lasts` seconds of other work."""
    offload = flow.offload * count
    return offload if job.device == "cpu" else max(0.0, offload - lasts)


def _segments(job: Job, machine: Machine) -> tuple[SegmentWork, ...]:
    return passed(_tape(job), job.model, machine, job.precision)


def _tape(job: Job) -> Tape:
    return layers_of(job) if job.engine == PIPELINE else tape_of(job)


# Pipelines


def stage_bounds(job: Job, machine: Machine) -> list[int]:
    """Bounds of the stages in the flat list of layers (finetune.plan.job.layers_of): stage s has those from bound s to
    bound s + 1. "uniform": equally many; "parameters": balanced by weights; else by time."""
    segments = _segments(job, machine)
    count = len(segments)
    if job.partition_method == "uniform":
        share, rest = divmod(count, job.stages)  # runtime/utils.py, partition_uniform
        return [stage * share + min(stage, rest) for stage in range(job.stages + 1)]
    if job.partition_method == "parameters":
        elements = {tensor.name: tensor.elements for tensor in job.model.tensors if tensor.trains}
        return list(_cut(tuple(float(sum(elements.get(name, 0) for name in s.weights)) for s in segments), job.stages))
    return list(_cut(tuple(sum(_lasting(segment, machine)) for segment in segments), job.stages))


@lru_cache(maxsize=256)
def _cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    return tuple(balanced_bounds(costs, stages))


def stage_seconds(job: Job, machine: Machine) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of a micro-batch on each stage, with recomputation in the backward ones."""
    segments, bounds = _segments(job, machine), stage_bounds(job, machine)
    forward, backward = [], []
    for first, last in pairwise(bounds):
        lasting = [_lasting(segment, machine) for segment in segments[first:last]]
        forward.append(sum(ahead for ahead, _ in lasting))
        backward.append(sum(back for _, back in lasting))
    return forward, backward


def pipeline_schedule(job: Job, machine: Machine) -> Schedule:
    """1F1B of a step's micro-batches through the job's stages."""
    return simulate(job.accumulation, *stage_seconds(job, machine), _transfer(job, machine))


def _transfer(job: Job, machine: Machine) -> float:
    """Seconds to send a micro-batch's hidden states from one stage to the next."""
    hidden = job.micro_batch * job.tokens * job.model.hidden_size * job.numbers.bytes_each
    # Ranks are numbered within a stage first, so with several nodes some pair of neighbours spans two nodes.
    return p2p(machine, hidden, within_node=job.world_size <= job.ranks_per_node)


def _lasting(segment: SegmentWork, machine: Machine) -> tuple[float, float]:
    """Forward and backward seconds, launches included."""
    forward, backward = segment.forward, segment.backward + segment.again
    return tuple(work.device + _launch(machine, work.launches, work.device) for work in (forward, backward))  # type: ignore[return-value]


def _pipeline(job: Job, machine: Machine) -> StepSeconds:
    """1F1B over the stages; then each stage's replicas reduce gradients and step. The slowest stage counts."""
    kernels, segments, bounds = kernels_of(machine, job.precision), _segments(job, machine), stage_bounds(job, machine)
    forward, backward = stage_seconds(job, machine)
    slowest = max(range(job.stages), key=lambda stage: forward[stage] + backward[stage])
    again = sum(s.again.device for s in segments[bounds[slowest] : bounds[slowest + 1]])
    busy = job.accumulation * (forward[slowest] + backward[slowest])
    ends: list[tuple[Traffic, Work, float]] = []
    for first, last in pairwise(bounds):
        names = frozenset[str]().union(*(segment.weights for segment in segments[first:last]))
        weights = Weights(tuple(t for t in job.model.tensors if t.name in names), job.weight_bytes)
        traffic = traffic_of(job, machine, kernels, _tape(job), weights)
        update = update_of(job, machine, kernels, weights)
        ends.append((traffic, update.work, update.host))
    reduced = max(t.boundary.communication + t.step.communication for t, _, _ in ends)
    copies = max((t.boundary.work + t.step.work for t, _, _ in ends), key=lambda work: work.device)
    updated = max((work for _, work, _ in ends), key=lambda work: work.device)
    return _step(job, machine, segments, {
        "forward": job.accumulation * forward[slowest],
        "backward": job.accumulation * (backward[slowest] - again),
        "recomputation": job.accumulation * again,
        "copies": copies.device,
        "optimizer": updated.device + max(host for _, _, host in ends),
        "communication": reduced + 2 * job.accumulation * _transfer(job, machine),
        "exposed_communication": reduced,
        "offload": 0.0,
        "launch": _launch(machine, copies.launches + updated.launches, copies.device + updated.device),
        "idle": pipeline_schedule(job, machine).makespan - busy,
    })  # fmt: skip
