"""The smallest cluster that finishes a run before a deadline, under the fastest layout that fits on it."""

from __future__ import annotations

from dataclasses import replace

from finetune.errors import RequestError
from finetune.plan.job import Job
from finetune.plan.largest import Answer
from finetune.plan.machine import Machine
from finetune.plan.search import MOST_RANKS, NOT_EVERYWHERE, Candidate, Limits, search
from finetune.plan.seconds import plan_seconds
from finetune.plan.write import flags_of, shared_by


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
    best_speed = max(machine.peak_flops.values()) / (step.model_flops / step.samples)  # per rank: no plan is faster
    divisors = (n for n in range(1, min(batch, MOST_RANKS) + 1) if batch % n == 0)
    counts = (n * job.sequence_parallel_size for n in divisors)
    numbers = [n for n in counts if (n <= per_node or not n % per_node) and not n % job.group]
    for ranks in numbers:
        if ranks * best_speed >= least_speed:
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
        why = f"even at peak speed {_ranks(numbers[-1])} {steps * batch / (numbers[-1] * best_speed) / 3600:.3g} hours"
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
