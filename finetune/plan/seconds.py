"""How long a training step takes, by part: a sum over a tape's operators, collectives, copies and launches.

    step = plan_seconds(job, find_machine("H100"))
    step.total, step.tokens_per_second, step.mfu

On a GPU the host runs ahead: a step's passes, and its end, last as long as the device works or as the host needs to
launch them, whichever is longer, and `launch` is what the host adds. On a CPU every launch adds its time. Collectives
that overlap with computation cost only what is not hidden (`exposed_communication`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from finetune.plan.collectives import Group, all_to_all, p2p
from finetune.plan.engines.resident import Weights
from finetune.plan.exchange import exchanges_of
from finetune.plan.job import PIPELINE, Job, checkpoints_of, layers_of, stage_weights, tape_of
from finetune.plan.kernels import NOTHING, SegmentWork, Work, kernels_of, passed
from finetune.plan.machine import Machine
from finetune.plan.model import RESNET
from finetune.plan.partition import balanced_bounds
from finetune.plan.schedule import Schedule, simulate
from finetune.plan.tape import Tape
from finetune.plan.traffic import Traffic, traffic_of
from finetune.plan.update import update_of
from finetune.plan.values import SENT

# The loop's own work (callbacks, schedule, collating) in eager launches, per step: MLPs of width 8.
STEP_LAUNCHES = 200.0
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
def share_of(machine: Machine, ranks: int) -> Machine:
    """A CPU's profile, measured with `ranks_per_node` ranks, as seen by each of `ranks`. Launches take one thread."""
    times = machine.ranks_per_node / ranks if ranks else 1.0
    if times == 1 or machine.device != "cpu":
        return machine
    return replace(
        machine,
        peak_flops={kind: times * peak for kind, peak in machine.peak_flops.items()},
        memory_bandwidth=times * machine.memory_bandwidth,
    )


def plan_seconds(job: Job, machine: Machine) -> StepSeconds:
    """For a step after warm-up."""
    machine = share_of(machine, min(job.world_size, job.ranks_per_node) if job.device == "cpu" else 0)
    if job.engine == PIPELINE:
        return _pipeline(job, machine)
    segments = _segments(job, machine)
    traffic, update = _ending(job, machine, Weights(job.held.tensors, job.weight_bytes))
    forward, backward, again = (
        sum((getattr(segment, part) for segment in segments), NOTHING) for part in ("forward", "backward", "again")
    )
    micros, copies, exposed, offload = job.accumulation, traffic.step.work, traffic.step.communication, 0.0
    moved, traded = 2 * _moved(job, machine), micros * _exchange(job, machine)
    sent = exposed + traded
    for flow, beside, count in (
        (traffic.forward, forward, micros),
        (traffic.backward, backward + again, micros - 1),
        (traffic.boundary, backward + again, 1),
    ):
        hidden = beside.device if traffic.overlaps else 0.0
        waited = max(flow.tail if traffic.overlaps else 0.0, flow.communication - hidden)
        copies += flow.work.times(count)
        exposed += count * waited
        sent += count * flow.communication
        # On a GPU transfers to and from the host overlap with all other work.
        offload += count * max(0.0, flow.offload - (beside.device + waited if job.device != "cpu" else 0.0))
    forward = forward + _asked(job, machine)
    ending, at_end = traffic.step.work + update, traffic.step.communication
    launches = (forward + backward + again).times(micros).launches + (copies + update).launches - ending.launches
    parts = {
        "forward": forward.device * micros,
        "backward": backward.device * micros,
        "recomputation": again.device * micros,
        "copies": copies.device,
        "optimizer": update.device + update.host,
        "exposed_communication": exposed + traded,
        "offload": offload + micros * moved,
    }
    # The host waits for the passes: for the loss (the Trainer's logging_nan_inf_filter; our guard, after the norm), and
    # under ZeRO with overlap_comm for the backward pass (zero/stage_1_and_2.py,
    # independent_gradient_partition_epilogue). So no launch of the step's end is ahead of the device, except
    # `job.runs_ahead`.
    busy, last = sum(parts.values()) - update.host, ending.device + at_end
    spans = [(launches, busy - last), (ending.launches, last)]
    spans = [(launches + ending.launches, busy)] if job.runs_ahead else spans
    parts["launch"] = sum(_launch(machine, *span) for span in spans)
    return _step(job, machine, segments, parts, sent)


def _moved(job: Job, machine: Machine, part: range | None = None) -> float:
    """Seconds in which a micro-batch's activation checkpoints go to the host, on the stream that computes; they take as
    long to come back."""
    return sum(checkpoints_of(job, part)) / machine.host_link.bandwidth_bytes_per_second


def _exchange(job: Job, machine: Machine) -> float:
    """Seconds in which neighbors that share a text trade tokens for heads and back, or those that share experts send
    each other tokens, in a micro-batch. Attention and experts wait for it."""
    total = 0.0
    for kind, ranks in zip(SENT, (job.sequence_parallel_size, job.expert_parallel_size), strict=True):
        if ranks > 1:
            group = Group(ranks, min(job.ranks_per_node, ranks))
            ahead, back = exchanges_of(_tape(job), kind)
            total += sum(all_to_all(machine, size, group) for size in ahead + back)
    return total


def _ending(job: Job, machine: Machine, weights: Weights) -> tuple[Traffic, Work]:
    """What ranks with these weights send each other, and their optimizer's step."""
    kernels = kernels_of(machine, job.precision, job.tf32)
    return traffic_of(job, machine, kernels, _tape(job), weights), update_of(job, machine, kernels, weights)


def _asked(job: Job, machine: Machine) -> Work:
    """Forward passes of a micro-batch without gradients: a teacher's or a reference's, for KTO's baseline the model's
    and its reference's once more, and those that look ahead. What ZeRO-3 gathers for them is not counted."""

    def forward(asked: Job) -> Work:
        return sum((segment.forward for segment in _segments(asked, machine)), NOTHING)

    once = forward(job.of_teacher) if job.teacher is not None else NOTHING
    if job.looks_ahead and job.accumulation > 1:
        once = sum((segment.forward for segment in _segments(job, machine)[:-1]), once)  # without the head
    return once.times(2) + forward(job) if job.baseline else once


def _step(
    job: Job, machine: Machine, segments: Sequence[SegmentWork], parts: dict[str, float], communication: float
) -> StepSeconds:
    """`parts`: of the total, in seconds as summed over single operators."""
    flops = sum(segment.flops for segment in segments) * job.accumulation * job.data_parallel_size
    seconds = {**dict.fromkeys(PARTS, 0.0), **parts, "loop": STEP_LAUNCHES * machine.launch_seconds}
    kernels = kernels_of(machine, job.precision, job.tf32)
    in_fp32 = kernels.fp32_convolution if job.model.family == RESNET else kernels.fp32
    precision = in_fp32 if kernels.precision == kernels.fp32 else kernels.precision
    return StepSeconds(
        **{name: machine.step_factor * part for name, part in seconds.items()},
        communication=machine.step_factor * communication,
        samples=job.global_batch,
        tokens=job.global_batch * job.sample_tokens,
        model_flops=flops,
        peak_flops=machine.peak_flops[precision] * job.world_size,
    )


def _launch(machine: Machine, launches: float, device: float) -> float:
    host = launches * machine.launch_seconds
    return host if machine.device == "cpu" else max(0.0, host - device)


def _segments(job: Job, machine: Machine) -> tuple[SegmentWork, ...]:
    return passed(_tape(job), machine, job.precision, job.tf32)


def _tape(job: Job) -> Tape:
    return layers_of(job) if job.engine == PIPELINE else tape_of(job)


# Pipelines


_cut = lru_cache(maxsize=256)(balanced_bounds)


def stage_bounds(job: Job, machine: Machine) -> list[int]:
    """Bounds of the stages in the flat list of layers (finetune.plan.job.layers_of): stage s has those from bound s to
    bound s + 1. "uniform": equally many; "parameters": balanced by weights; else by time."""
    segments = _segments(job, machine)
    count = len(segments)
    if job.partition_method == "uniform":
        share, rest = divmod(count, job.stages)  # runtime/utils.py, partition_uniform
        return [stage * share + min(stage, rest) for stage in range(job.stages + 1)]
    if job.partition_method == "parameters":
        entries = (stage_weights(job, range(place, place + 1)) for place in range(count))
        return list(_cut(tuple(float(sum(t.elements for t in one if t.trains)) for one in entries), job.stages))
    return list(_cut(tuple(sum(_lasting(segment, machine)) for segment in segments), job.stages))


def stage_seconds(job: Job, machine: Machine) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of a micro-batch on each stage, with recomputation in the backward ones, and copies
    of activation checkpoints in both."""
    segments, bounds = _segments(job, machine), stage_bounds(job, machine)
    forward, backward = [], []
    for first, last in pairwise(bounds):
        lasting = [_lasting(segment, machine) for segment in segments[first:last]]
        moved = _moved(job, machine, range(first, last))
        forward.append(moved + sum(ahead for ahead, _ in lasting))
        backward.append(moved + sum(back for _, back in lasting))
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
    segments, bounds = _segments(job, machine), stage_bounds(job, machine)
    forward, backward = stage_seconds(job, machine)
    slowest = max(range(job.stages), key=lambda stage: forward[stage] + backward[stage])
    again = sum(s.again.device for s in segments[bounds[slowest] : bounds[slowest + 1]])
    busy = job.accumulation * (forward[slowest] + backward[slowest])
    moved = _moved(job, machine, range(bounds[slowest], bounds[slowest + 1]))
    held = (stage_weights(job, range(*cut)) for cut in pairwise(bounds))
    ends = [_ending(job, machine, Weights(tensors, job.weight_bytes)) for tensors in held]
    reduced = max(traffic.boundary.communication + traffic.step.communication for traffic, _ in ends)
    copies = max((traffic.boundary.work + traffic.step.work for traffic, _ in ends), key=lambda work: work.device)
    update = max((update for _, update in ends), key=lambda update: update.device + update.host)
    launches = max((traffic.boundary.work + traffic.step.work + update).launches for traffic, update in ends)
    parts = {
        "forward": job.accumulation * (forward[slowest] - moved),
        "backward": job.accumulation * (backward[slowest] - again - moved),
        "recomputation": job.accumulation * again,
        "copies": copies.device,
        "optimizer": update.device + update.host,
        "exposed_communication": reduced,
        "offload": 2 * job.accumulation * moved,
        "launch": _launch(machine, launches, copies.device + update.device),
        "idle": pipeline_schedule(job, machine).makespan - busy,
    }
    return _step(job, machine, segments, parts, reduced + 2 * job.accumulation * _transfer(job, machine))
