"""Which layout to choose: the shipped configs, micro-batches, accumulation, checkpointing and stages that fit a
machine, ranked by throughput.

A larger micro-batch never takes less memory, so bisection finds the largest that fits each layout; all below it fit,
too, and the fastest are then planned in full.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from finetune.dsconfig.config import Config
from finetune.errors import RequestError
from finetune.plan.job import ADAM, DEEPSPEED, PIPELINE, TRAINER, Job
from finetune.plan.machine import Machine
from finetune.plan.optimizers import Optimizer
from finetune.plan.plan import Plan, fullness, plan
from finetune.plan.seconds import plan_seconds
from finetune.plan.zero import read_zero
from finetune.shipped import DS_CONFIGS

# The field's advice, as data.
LARGEST_MICRO_BATCH = 256  # a GPU is saturated long before
MICRO_BATCHES_A_STAGE = 8  # (P - 1) / (M + P - 1): at 8 per stage about a tenth of a pipeline idles
CHECKPOINT_INTERVALS = (0, 1)  # none, or every layer
MOST_STAGES = 16
MOST_RANKS = 4096  # the limit of curves and of proposed numbers of ranks
SHOWN = 12  # of the fastest, besides the fastest of each layout
TRAINER_ALONE, NVME = "none", "zero3_nvme"
WITHOUT_DEEPSPEED = "--deepspeed none"  # "none" alone says nothing in a sentence
NOT_SHARED = (TRAINER_ALONE, "zeropp", "pipeline")  # layouts without shared texts and tiled MLPs
EXPERT_PARALLEL = ("zero1", "zero2", "zero2_offload")  # layouts with expert parallelism
NOT_EVERYWHERE = (
    "pipeline is for GPT-lites, zeropp for several nodes of GPUs, and some models cannot be sharded by ZeRO-3"
)
# In order of preference among equally fast ones: the simplest first. The toolkit has no tensor parallelism.
# Pipelines go with ZeRO-1: DeepSpeed allows them with ZeRO-0 and -1 only
# (runtime/pipe/engine.py, __init__), and the toolkit with -1, which is never worse.
LAYOUTS = (
    TRAINER_ALONE,
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
    "pipeline",
    "zero2_offload",
    "zero3_offload",
    NVME,
)


@dataclass(frozen=True)
class Candidate:
    """A layout for a job."""

    layout: str
    plan: Plan
    measured: float | None = None  # samples per second of a real run
    precision: str | None = None  # if it differs from the job's
    eval_batch: int | None = None  # likewise

    @property
    def samples_per_second(self) -> float:
        """Measured if available, else planned."""
        return self.plan.seconds.samples_per_second if self.measured is None else self.measured

    @property
    def name(self) -> str:
        return f"{self.layout} {self.precision}" if self.precision else self.layout

    @property
    def words(self) -> str:
        """In terms of flags."""
        job = self.plan.job
        name = self.name.replace(TRAINER_ALONE, WITHOUT_DEEPSPEED)
        parts = [name, f"micro-batch {job.micro_batch}"]
        if job.accumulation > 1:
            parts.append(f"accumulation {job.accumulation}")
        if job.checkpoint_interval:
            parts.append("checkpointing")
        if self.eval_batch and self.plan.fits:
            parts.append(f"evaluation batch {self.eval_batch}")
        if job.stages > 1:
            parts.append(f"{job.stages} stages")
        sizes = {"text": job.sequence_parallel_size, "set of experts": job.expert_parallel_size}
        parts += [f"{size} ranks per {what}" for what, size in sizes.items() if size > 1]
        return ", ".join(parts)


@dataclass(frozen=True)
class Limits:
    """What the search may not change. `global_batch`: samples per step; None: any. `precisions`: besides the job's.
    `has_disk`: the run names a folder for NVMe offload."""

    global_batch: int | None = None
    layouts: Sequence[str] = LAYOUTS
    precisions: Sequence[str] = ()
    has_disk: bool = False

    @property
    def usual(self) -> Limits:
        """If no layouts are chosen: without NVMe offload, which is slow, unless the run names a folder for it."""
        return self if self.has_disk else replace(self, layouts=[name for name in self.layouts if name != NVME])


@dataclass(frozen=True)
class Found:
    """`fitting`: the fastest first; `failing`: layouts that fit with no micro-batch, each with its smallest."""

    fitting: tuple[Candidate, ...]
    failing: tuple[Candidate, ...]
    seen: int


def search(job: Job, machine: Machine, limits: Limits) -> Found:
    """Raises RequestError if this number of ranks cannot make the global batch, or if no layout is possible."""
    if limits.global_batch is not None and limits.global_batch < 1:
        raise RequestError(f"--global_batch_size is {limits.global_batch}, but it must be 1 or more.")
    fitting: list[tuple[float, str, Job]] = []
    failing: list[tuple[str, Job]] = []
    seen = 0
    kinds = _precisions(job, machine, limits)
    tried = [found for kind in kinds for found in bases(replace(job, precision=kind), machine, limits)]
    for layout, base in tried:
        options = list(_batches(base, limits))
        count = bisect_left(options, True, key=lambda one: fullness(_trimmed(one, machine), machine) > 1)
        good = [_trimmed(one, machine) for one in options[:count]]  # they grow
        seen += len(options)
        if options and not good:
            failing.append((layout, _trimmed(options[0], machine)))
        fitting += [(plan_seconds(one, machine).samples_per_second, layout, one) for one in good]
    if not tried:
        raise RequestError(
            f"--layouts {' '.join(limits.layouts)}: none is possible for this run: {NOT_EVERYWHERE}. Add others."
        )
    if not seen:
        raise RequestError(
            f"--global_batch_size {limits.global_batch}: {job.world_size} ranks cannot make it: it must be a multiple "
            "of ranks / stages. Change it, or the number of ranks."
        )
    fitting.sort(key=lambda entry: -entry[0])
    best = [_candidate(layout, plan(one, machine), job) for layout, one in _leaders(fitting)]
    others = [_candidate(layout, plan(one, machine), job) for layout, one in failing]
    return Found(tuple(best), tuple(others), seen)


def _trimmed(job: Job, machine: Machine) -> Job:
    """If the evaluation batch may be what does not fit, the job with one no larger than the micro-batch: training
    does not depend on it."""
    if job.eval_batch <= job.micro_batch or fullness(job, machine) <= 1:
        return job
    return replace(job, eval_batch=job.micro_batch)


def _candidate(layout: str, found: Plan, job: Job) -> Candidate:
    precision = found.job.precision if found.job.precision != job.precision else None
    eval_batch = found.job.eval_batch if found.job.eval_batch != job.eval_batch else None
    return Candidate(layout, found, precision=precision, eval_batch=eval_batch)


def _precisions(job: Job, machine: Machine, limits: Limits) -> list[str]:
    """The job's, and those in which the Trainer alone is faster: a slower one that takes no less memory is dropped."""

    def seconds(precision: str) -> float:
        alone = laid_out(replace(job, precision=precision, micro_batch=1, accumulation=1, eval_batch=0), TRAINER_ALONE)
        return plan_seconds(alone, machine).total

    others = [kind for kind in limits.precisions if kind != job.precision and kind in machine.peak_flops]
    return [job.precision, *(kind for kind in others if seconds(kind) < seconds(job.precision))]


def _leaders(fitting: list[tuple[float, str, Job]]) -> Iterator[tuple[str, Job]]:
    layouts = set()
    for index, (_, layout, job) in enumerate(fitting):
        kind = layout, job.group
        if index < SHOWN or kind not in layouts:
            yield layout, job
        layouts.add(kind)


def bases(job: Job, machine: Machine, limits: Limits) -> Iterator[tuple[str, Job]]:
    """Each combination of layout, checkpointing and number of stages to search, as a job. If ranks are to share texts
    or experts, each layout also without that, for comparison."""
    if job.group > 1:
        yield from bases(replace(job, sequence_parallel_size=1, expert_parallel_size=1), machine, limits)
    for layout in limits.layouts:
        if not goes_with(job, layout):
            continue
        if layout == "zeropp" and (machine.device == "cpu" or job.world_size <= job.ranks_per_node):
            continue  # on one node it is the same as zero3
        for interval in CHECKPOINT_INTERVALS:
            for stages in _stages(job) if layout == "pipeline" else (1,):
                yield layout, replace(laid_out(job, layout), checkpoint_interval=interval, stages=stages)


def goes_with(job: Job, layout: str) -> bool:
    """Whether recipes train such a job under a shipped config."""
    if (job.sequence_parallel_size > 1 or job.tiled_mlp_num_shards) and layout in NOT_SHARED:
        return False
    if job.expert_parallel_size > 1 and layout not in EXPERT_PARALLEL:
        return False
    return job.model.shards or laid_out(job, layout).zero.stage < 3


def laid_out(job: Job, layout: str) -> Job:
    """`job` under a shipped config."""
    optimizer = ADAM if job.optimizer.kind == "cpu_adam" else job.optimizer
    if layout == TRAINER_ALONE:
        return replace(job, engine=TRAINER, zero=read_zero(Config({}), 1), optimizer=optimizer, stages=1)
    zero = read_zero(Config(shipped(layout)), job.model.hidden_size, 1.0, job.precision)
    if layout == "zeropp":
        zero = replace(zero, hpz_ranks=job.ranks_per_node)
    if zero.offload_optimizer != "none":
        optimizer = Optimizer("cpu_adam")
    engine = PIPELINE if layout == "pipeline" else DEEPSPEED
    return replace(job, engine=engine, zero=zero, optimizer=optimizer, stages=1)


def shipped(layout: str) -> dict[str, object]:
    return dict(json.loads((DS_CONFIGS / f"{layout}.json").read_text(encoding="utf-8")))


def _stages(job: Job) -> Iterator[int]:
    """Divisors of the world size; only GPT-lite is a list of layers."""
    if job.model.family != "gptlite":
        return
    for stages in range(2, min(MOST_STAGES, job.model.layers, job.world_size) + 1):
        if job.world_size % stages == 0:
            yield stages


def _batches(job: Job, limits: Limits) -> Iterator[Job]:
    """Micro-batches doubled from 1, and the requested one: the job's."""
    doubled = [1 << power for power in range(LARGEST_MICRO_BATCH.bit_length())]
    for micro in sorted({*doubled, job.micro_batch}):
        share = micro * job.readers
        if limits.global_batch is None:
            steps = MICRO_BATCHES_A_STAGE * job.stages if job.stages > 1 else job.accumulation
            yield replace(job, micro_batch=micro, accumulation=steps)
        elif limits.global_batch % share == 0:
            yield replace(job, micro_batch=micro, accumulation=limits.global_batch // share)


def scaling(job: Job, machine: Machine) -> list[tuple[int, float, float]]:
    """(ranks, samples per second, samples per second under perfect scaling) of the same layout from one node, or from
    one pipeline or group that is larger, up to 4,096 ranks, each with the same micro-batch."""
    together = max(job.stages, job.group)
    first = max(1, min(job.world_size, job.ranks_per_node) // together) * together
    counts = [first << doublings for doublings in range(MOST_RANKS.bit_length()) if first << doublings <= MOST_RANKS]
    speeds = [plan_seconds(replace(job, world_size=ranks), machine).samples_per_second for ranks in counts]
    return [(ranks, speed, speeds[0] * (ranks // first)) for ranks, speed in zip(counts, speeds, strict=True)]


def slower_by(best: Candidate, other: Candidate) -> tuple[str, float]:
    """The part of a sample's time by which `other` loses the most, and the difference in seconds."""
    ours, theirs = best.plan.seconds, other.plan.seconds
    more = {part: seconds / theirs.samples - ours.parts[part] / ours.samples for part, seconds in theirs.parts.items()}
    part = max(more, key=lambda name: more[name])
    return part, more[part]
