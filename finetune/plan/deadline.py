"""The smallest cluster that finishes a run before a deadline, under the fastest layout that fits on it."""

from __future__ import annotations

from dataclasses import replace

from finetune.errors import RequestError
from finetune.plan.job import Job
from finetune.plan.largest import Answer
from finetune.plan.machine import Machine
from finetune.plan.search import MOST_RANKS, Limits, search
from finetune.plan.seconds import plan_seconds
from finetune.plan.write import flags_of


def smallest_cluster(job: Job, machine: Machine, limits: Limits, steps: int | None, hours: float) -> Answer:
    """The fewest ranks that do `steps` steps of the global batch in `hours`. Tries each number that divides the batch:
    within one node, then whole nodes. Raises RequestError if none is fast enough."""
    if steps is None or steps < 1:
        raise RequestError("--deadline: the number of steps depends on the data, which is not read. Give --max_steps.")
    batch, per_node, smaller, fastest = limits.global_batch or job.global_batch, job.ranks_per_node, None, 0.0
    least_speed = steps * batch / (3600 * hours)  # samples a second
    step = plan_seconds(job, machine)
    best_speed = max(machine.peak_flops.values()) / (step.model_flops / step.samples)  # per rank: no plan is faster
    for ranks in (n for n in range(1, min(batch, MOST_RANKS) + 1) if batch % n == 0):
        if ranks > per_node and ranks % per_node:
            continue
        if ranks * best_speed >= least_speed:
            one = replace(job, world_size=ranks, ranks_per_node=min(ranks, per_node))
            for best in search(one, machine, limits).fitting[:1]:
                fastest = max(fastest, best.samples_per_second)
                if best.samples_per_second >= least_speed:
                    takes, flags = steps * batch / best.samples_per_second / 3600, flags_of(best.plan.job, best.layout)
                    return Answer("deadline", ((ranks, best),), smaller, flags, takes)
        smaller = ranks
    took = f"the fastest takes {steps * batch / fastest / 3600:.3g} hours" if fastest else "nothing fits"
    raise RequestError(
        f"--deadline {hours:g}: no cluster finishes {steps:,} steps of {batch:,} samples in that many hours; {took}. "
        "Allow more time, use a faster GPU, or give a larger --global_batch_size with fewer steps."
    )
