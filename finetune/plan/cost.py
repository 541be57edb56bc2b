"""What a run costs, an upper bound on its energy, and what one more GPU changes: all from a plan's step time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune.plan.job import PIPELINE
from finetune.plan.plan import Plan, plan

USUAL_STEPS = 1000  # assumed if --max_steps is not given
# Median and worst error, held out from fitting: of published speeds (docs/results/plan_public.md), and of the step
# times in docs/results/plan.md.
ON_GPUS = "half of 247 published speeds, mostly on A100 and H100, were predicted within 4.2%; the worst was 59% off"
ON_CPUS = "half of 108 step times on a CPU were predicted within 12% by rates fitted to others; the worst was 114% off"


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
    error = ON_CPUS if found.machine.device == "cpu" else ON_GPUS
    return Cost(count, is_told, hours, spent, price_per_gpu_hour, spent * price_per_gpu_hour, kwh, error)


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
