"""Changes that make a plan fit or lower its peak: the gentlest of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from finetune.plan.job import Job
from finetune.plan.plan import Plan, plan
from finetune.plan.search import MOST_RANKS, Candidate, Found, goes_with, laid_out

MOST_MENDS = 4


def mends(found: Plan) -> list[Candidate]:
    """Changes that make a plan fit: the gentlest sufficient one of each kind."""
    return list(islice(_gentlest(found, lambda tried: tried.fits), MOST_MENDS))


def ways_out(found: Plan, searched: Found | None) -> list[Candidate]:
    """The mends of a plan that does not fit. The best layout of a search comes first, and then only those gentle
    changes that are faster than it."""
    gentle = mends(found)
    if searched is None or not searched.fitting:
        return gentle
    best = searched.fitting[0]
    faster = [one for one in gentle if one.samples_per_second > best.samples_per_second]
    return [replace(best, layout=best.words, precision=None), *faster]


def cheaper(found: Plan) -> list[Candidate]:
    """Changes that lower a plan's peak by a tenth, whether or not it fits: the gentlest sufficient one of each kind,
    and of those the three fastest."""
    kept = _gentlest(found, lambda tried: tried.peak_bytes <= 0.9 * found.peak_bytes)
    return sorted(kept, key=lambda one: one.plan.seconds.total)[:3]


def _gentlest(found: Plan, does: Callable[[Plan], bool]) -> Iterator[Candidate]:
    for kind in _changes(found.job):
        tried = (Candidate(words, plan(changed, found.machine), None) for words, changed in kind)
        yield from islice((one for one in tried if does(one.plan)), 1)


def _changes(job: Job) -> Iterator[list[tuple[str, Job]]]:
    again = replace(job, checkpoint_interval=1)
    if not job.checkpoint_interval:
        yield [("activation checkpointing every layer", again)]
    halves = [job.eval_batch >> halvings for halvings in range(1, job.eval_batch.bit_length())]
    yield [(f"an evaluation batch of {batch}", replace(job, eval_batch=batch)) for batch in halves]
    smaller = []
    for micro in (job.micro_batch >> halvings for halvings in range(1, job.micro_batch.bit_length())):
        steps = job.accumulation * job.micro_batch // micro
        smaller.append((f"a micro-batch of {micro}", replace(job, micro_batch=micro, accumulation=steps)))
    yield smaller
    if job.stages == 1:
        away = ("zero2_offload", "zero3_offload", "zero3_nvme")
        kinds = [(("zero1", "zero2", "zero3"), job), (away, job), (("zero2", "zero3", *away), again)]
        for names, kind in kinds:
            words = "{}" if kind is job else "{} and checkpointing"
            yield [(words.format(name), laid_out(kind, name)) for name in names if goes_with(job, name)]
        most = "zero3" if goes_with(job, "zero3") else "zero2"
        more = [job.world_size << doublings for doublings in range(1, 13)]
        yield [
            (f"{ranks} ranks under {most} with checkpointing", replace(laid_out(again, most), world_size=ranks))
            for ranks in more
            if ranks <= MOST_RANKS
        ]
