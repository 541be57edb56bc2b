"""Answers to questions about a run: the largest block, batch or model that fits; the smallest cluster that is fast
enough; what it costs, and what one more GPU changes. With the flags and the file that select a layout.

Each size tried is planned like any other job. Memory grows with the size, so bracketing finds the last size that fits
before the first that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.plan.job import PIPELINE, TRAINER, Job
from finetune.plan.machine import Machine, write_json_or_refuse
from finetune.plan.plan import Plan, fullness, plan
from finetune.plan.search import MOST_RANKS, NOT_EVERYWHERE, Candidate, Found, Limits, bases, laid_out, search, shipped
from finetune.plan.seconds import plan_seconds, share_of
from finetune.run.flags.groups import GROUPS

ABOVE = 2  # sizes to try above the boundary found: a model with more parameters can need less memory
AS_ASKED = "as asked"
USUAL_STEPS = 1000  # assumed if --max_steps is not given
# Median and worst error, held out from fitting: of published speeds (docs/results/plan_public.md), and of the step
# times in docs/results/plan.md.
ON_GPUS = "half of 244 published speeds, mostly on A100 and H100, were predicted within 4.0%; the worst was 58% off"
ON_CPUS = "half of 108 step times on a CPU were predicted within 12% by rates fitted to others; the worst was 114% off"


@dataclass(frozen=True)
class Answer:
    """`question`: the name of its flag. `options`: the result under each layout, best first. `next`: the next size,
    which fails, or None if there is none. `flags`: the recipe flags that select what was found."""

    question: str
    options: tuple[tuple[int | str, Candidate], ...]
    next: int | str | None
    flags: str
    hours: float | None = None  # that the run takes, for --deadline

    @property
    def found(self) -> int | str:
        return self.options[0][0]

    @property
    def plan(self) -> Plan:
        return self.options[0][1].plan


def most_that_fits(
    question: str, flag: str, sizes: Sequence[Any], job_at: Callable[[Any], Job], machine: Machine,
    limits: Limits | None,
) -> Answer:  # fmt: skip
    """The largest of `sizes` (ascending) that fits. `job_at` makes the job of a size. `flag` is the recipe flag of the
    size, or "" if the job's own flags include it. `limits` None: only the job's own layout. Raises RequestError if
    nothing fits."""
    found = list[tuple[int, Candidate]]()
    smallest = job_at(sizes[0])
    tried: Iterable[tuple[str, Job | None]] = bases(smallest, machine, limits) if limits else [(AS_ASKED, None)]
    for layout, base in tried:
        job = cache(lambda index, layout=layout, base=base: _laid(job_at(sizes[index]), layout, base))
        index = _highest(cache(lambda index, job=job: fullness(job(index), machine)), len(sizes))
        if index is not None:
            found.append((index, Candidate(layout, plan(job(index), machine))))
    if not found:
        layouts = "" if limits else ", or let the plan choose the layout"
        raise RequestError(
            f"--{question}: nothing fits on {machine.name}, not even {sizes[0]}. Use more ranks or a "
            f"larger GPU{layouts}. To see why, and what fits with other flags, drop --{question}."
        )
    found.sort(key=lambda one: (-one[0], -one[1].samples_per_second))
    index, best = found[0]
    asked = ("", True) if limits is None else (best.layout, limits.has_disk)
    flags = flags_of(best.plan.job, *asked, shared_by(smallest))
    flags += f" --{flag} {sizes[index]}" if flag else ""
    beyond = sizes[index + 1] if index + 1 < len(sizes) else None
    return Answer(question, tuple((sizes[index], one) for index, one in found), beyond, flags)


def _laid(job: Job, layout: str, base: Job | None) -> Job:
    """The job under a layout, as `bases` combines it with others' settings; without them as it is."""
    if base is None:
        return job
    return replace(laid_out(job, layout), **{name: getattr(base, name) for name in ("checkpoint_interval", *GROUPS)})


def _highest(fullness: Callable[[int], float], count: int) -> int | None:
    """The index of the largest size that fits, or None. Memory is nearly linear in the size, so linear interpolation
    usually lands close; every third guess bisects, which bounds the number of guesses."""
    low, high, turn = 0, count - 1, 0
    if fullness(low) > 1 or fullness(high) <= 1:
        return None if fullness(low) > 1 else high
    while high - low > 1:
        below, over = fullness(low), fullness(high)
        share = 0.5 if turn % 3 == 2 or over <= below else (1 - below) / (over - below)
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if fullness(guess) <= 1 else (low, guess)
        turn += 1
    while more := next((one for one in range(min(low + ABOVE, count - 1), low, -1) if fullness(one) <= 1), None):
        low = more
    return low


def smallest_cluster(job: Job, machine: Machine, limits: Limits, steps: int | None, hours: float) -> Answer:
    """The fewest ranks that do `steps` steps of the global batch in `hours`. Tries each number that divides the batch,
    of ranks or of groups that share texts: within one node, then whole nodes; skips those on which no layout is
    possible. Raises RequestError if none is fast enough."""
    if steps is None or steps < 1:
        raise RequestError("--deadline: the number of steps depends on the data, which is not read. Give --max_steps.")
    batch, per_node, smaller = limits.global_batch or job.global_batch, job.ranks_per_node, None
    tried = list[list[Candidate] | None]()
    least_speed = steps * batch / (3600 * hours)  # samples a second
    step = plan_seconds(job, machine)
    each = step.model_flops / step.samples

    def most(ranks: int) -> float:
        """Samples per second at peak speed: no plan is faster."""
        return ranks * max(share_of(machine, min(ranks, per_node)).peak_flops.values()) / each

    divisors = (n for n in range(1, min(batch, MOST_RANKS) + 1) if batch % n == 0)
    counts = (n * job.sequence_parallel_size for n in divisors)
    numbers = [n for n in counts if (n <= per_node or not n % per_node) and not n % job.group]
    if not numbers:
        raise RequestError(
            f"--deadline: a batch of {batch:,} cannot be divided among groups of {job.group} ranks on nodes of "
            f"{per_node}. Give another --global_batch_size, or smaller groups."
        )
    for ranks in numbers:
        if most(ranks) >= least_speed:
            one = replace(job, world_size=ranks, ranks_per_node=min(ranks, per_node))
            tried.append(_fastest(one, machine, limits))
            for best in tried[-1] or ():
                if best.samples_per_second >= least_speed:
                    takes = steps * batch / best.samples_per_second / 3600
                    flags = flags_of(best.plan.job, best.layout, limits.has_disk, shared_by(job))
                    return Answer("deadline", ((ranks, best),), smaller, flags, takes)
        smaller = ranks
    if tried and all(one is None for one in tried):
        raise RequestError(
            f"--deadline: no number of ranks that divides a batch of {batch:,} allows --layouts "
            f"{' '.join(limits.layouts)} ({NOT_EVERYWHERE}). Add others, or give another --global_batch_size."
        )
    speeds = [best.samples_per_second for one in tried for best in one or ()]
    if speeds:
        why = f"the fastest takes {steps * batch / max(speeds) / 3600:.3g} hours"
    elif tried:
        why = "nothing fits"
    else:
        why = f"even at peak speed {_ranks(numbers[-1])} {steps * batch / most(numbers[-1]) / 3600:.3g} hours"
    raise RequestError(
        f"--deadline {hours:g}: no cluster finishes {steps:,} steps of {batch:,} samples in that many hours; {why}. "
        "Allow more time, use a faster GPU, or give a larger --global_batch_size with fewer steps."
    )


def _fastest(job: Job, machine: Machine, limits: Limits) -> list[Candidate] | None:
    """The fastest layout, if one fits; None if none is possible on this number of ranks."""
    try:
        return list(search(job, machine, limits).fitting[:1])
    except RequestError:
        return None


def _ranks(number: int) -> str:
    return "1 rank takes" if number == 1 else f"{number:,} ranks take"


@dataclass(frozen=True)
class Cost:
    """The cost of `steps` training steps, without evaluation, saving and start-up. `is_told`: --max_steps gave `steps`.
    `price` is the total, in the currency of `price_per_gpu_hour`. `most_kwh` is the energy at full board power, None if
    that is unknown. `error` describes how accurate planned times have been."""

    steps: int
    is_told: bool
    hours: float
    gpu_hours: float
    price_per_gpu_hour: float
    price: float
    most_kwh: float | None
    error: str


def cost_of(found: Plan, price_per_gpu_hour: float, steps: int | None) -> Cost:
    """`steps` is the value of --max_steps: None or below 1 if epochs set the length, which then depends on the data."""
    is_told = (steps or 0) > 0
    count = steps if steps and is_told else USUAL_STEPS
    hours = count * found.seconds.total / 3600
    spent = hours * found.job.world_size
    kwh = spent * found.machine.board_power_watts / 1000 or None
    price = spent * price_per_gpu_hour
    return Cost(count, is_told, hours, spent, price_per_gpu_hour, price, kwh, error_of(found.machine))


def error_of(machine: Machine) -> str:
    """How accurate planned times have been, as a sentence without its full stop."""
    return ON_CPUS if machine.device == "cpu" else ON_GPUS


def one_more_of(found: Plan) -> Plan:
    """The same layout and micro-batch with one more GPU, or with the fewest that the layout can add: one per stage for
    a pipeline, a group that shares weights for ZeRO++, texts, or experts."""
    job = found.job
    fewest = job.stages if job.engine == PIPELINE else max(job.zero.hpz_ranks, job.group)
    ranks = job.world_size + fewest
    has_room = job.world_size <= job.ranks_per_node and ranks <= found.machine.ranks_per_node
    one = replace(job, world_size=ranks, ranks_per_node=ranks if has_room else job.ranks_per_node)
    return plan(one, found.machine)


def speedup_of(found: Plan, more: Plan) -> float:
    """The ratio of samples per second."""
    return more.seconds.samples_per_second / found.seconds.samples_per_second


# What selects a layout


def write_config(path: Path, found: Found | None, has_disk: bool = False) -> str:
    """Writes the DeepSpeed config of the fastest layout that has one. Returns which flags go with it. Raises
    RequestError if nothing fits, or if the file exists."""
    if found is None or not found.fitting:
        raise RequestError("--write: no layout fits, so there is nothing to write. See above for what would help.")
    if path.exists():
        raise RequestError(f"--write {path}: already exists. Give another name, or delete it.")
    fastest = found.fitting[0]
    shared = shared_by(*(one.plan.job for one in (*found.fitting, *found.failing)))
    best = next((one for one in found.fitting if one.plan.job.engine != TRAINER), None)
    alone = ""
    if fastest.plan.job.engine == TRAINER:
        alone = f"the fastest layout needs no config: --deepspeed none {flags_of(fastest.plan.job, shared=shared)}"
        if best is None:
            return f"nothing written: {alone}"
        alone += f" ({fastest.samples_per_second / best.samples_per_second:.2f}x as fast)\n"
    assert best is not None
    write_json_or_refuse(path, shipped(best.layout))
    flags = flags_of(best.plan.job, has_disk=has_disk, shared=shared)
    recipe = "recipes/causal_lm_pipeline.py" if best.plan.job.engine == PIPELINE else "RECIPE"
    return f"{alone}wrote {path} ({best.words}); run {recipe} --deepspeed {path} {flags}"


def shared_by(*jobs: Job) -> list[str]:
    """The flags with which ranks share something in any of the `jobs`."""
    return [name for name in GROUPS if any(getattr(job, name) > 1 for job in jobs)]


def flags_of(
    job: Job,
    layout: str = "",
    has_disk: bool = False,
    shared: Sequence[str] = (),
    also: Sequence[str] = ("eval_batch", "precision"),
) -> str:
    """The recipe flags that select this job; `layout` adds a shipped config. `has_disk`: the run already has
    --nvme_path, or a config that names the folder. `shared`: flags with which ranks share something in the run; here
    they need not."""
    flags = [] if not layout or job.engine == PIPELINE else [f"--deepspeed {layout}"]
    flags += [f"--per_device_train_batch_size {job.micro_batch}", f"--gradient_accumulation_steps {job.accumulation}"]
    flags += [f"--per_device_eval_batch_size {job.eval_batch}"] if job.eval_batch and "eval_batch" in also else []
    if "precision" in also:
        flags += [f"--{name} {job.precision == name}" for name in ("bf16", "fp16") if job.precision in (name, "fp32")]
    if job.checkpoint_interval:
        flags.append(f"--activation_checkpoint_interval {job.checkpoint_interval}")
    flags += [f"--{name} {getattr(job, name)}" for name in shared]
    if job.engine == PIPELINE:
        flags.append(f"--pipeline_parallel_size {job.stages}")
    if not has_disk and "nvme" in (job.zero.offload_optimizer, job.zero.offload_param):
        flags.append("--nvme_path FOLDER")
    return " ".join(flags)
