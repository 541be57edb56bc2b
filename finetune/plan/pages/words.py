"""Sentences about a plan, for the terminal, the page and the pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.drawing.words import count_words, gib, number, plain, seconds_words
from finetune.plan.job import NO_TEXT, PIPELINE, TRAINER
from finetune.plan.pages.kinds import fills_host, rank_kinds

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate
    from finetune.plan.step import Moment


def headline(plan: Plan) -> str:
    """What is planned, in a sentence."""
    job, model = plan.job, plan.job.model
    of_tokens = "" if job.model.family in NO_TEXT else f" of {job.tokens:,} tokens"
    batch = f"micro-batch {job.micro_batch}{of_tokens}"
    batch += f", accumulation {job.accumulation}" if job.accumulation > 1 else ""
    more = f", {job.stages} stages" if job.stages > 1 else ""
    more += ", activation checkpointing" if job.checkpoint_interval else ""
    samples = "sample" if job.global_batch == 1 else "samples"
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size:,} ranks"
    return plain(
        f"{model.family}, {count_words(model.parameters)} parameters, {job.precision}, {engine_words(plan)} on {ranks} "
        f"of {plan.machine.name}{more}, {batch}; {job.global_batch:,} {samples} a step."
    )


def verdict(plan: Plan) -> str:
    room = plan.limit_bytes - plan.peak_bytes
    held = f"{gib(plan.peak_bytes)} of {gib(plan.limit_bytes)} GiB at the peak"
    if room < 0:
        return f"It does not fit: {held}, {gib(-room)} GiB too much."
    if not plan.fits:
        return f"It does not fit: {gib(plan.host_bytes)} GiB of host memory a node, of {gib(plan.host_limit_bytes)}."
    return f"It fits: {held} ({plan.peak_bytes / plan.limit_bytes:.0%}), {gib(room)} GiB are left."


def engine_words(plan: Plan) -> str:
    job = plan.job
    if job.engine == PIPELINE:
        return f"a pipeline with ZeRO-{job.zero.stage}"
    if job.engine == TRAINER:
        return "the Trainer" if job.world_size == 1 else "DDP"
    kinds = {job.zero.offload_optimizer, job.zero.offload_param} - {"none"}
    return f"ZeRO-{job.zero.stage}" + (f" with offload to {' and '.join(sorted(kinds))}" if kinds else "")


def more_words(plan: Plan) -> list[str]:
    seconds = plan.seconds
    lines = [
        f"{number(seconds.samples_per_second)} samples/s, {number(seconds.tokens_per_second)} tokens/s over all ranks; "
        f"{seconds.mfu:.1%} of the peak FLOP/s."
    ]
    if seconds.communication:
        hidden = max(0.0, seconds.communication - seconds.exposed_communication)
        lines.append(
            f"Collectives take {seconds_words(seconds.communication)} in all, of which computation hides "
            f"{seconds_words(hidden)}."
        )
    if plan.host_bytes and not fills_host(plan):
        lines.append(f"On the host: up to {gib(plan.host_bytes)} of {gib(plan.host_limit_bytes)} GiB a node.")
    return lines


def mend_words(mend: Candidate) -> str:
    """Of a candidate whose layout is the change, in words."""
    return f"{mend.layout}: {gib(mend.plan.peak_bytes)} GiB, {number(mend.samples_per_second)} samples/s"


def moment_words(moment: Moment) -> str:
    return plain(f"{moment.phase}, {moment.where}" if moment.where else moment.phase)


def peak_words(plan: Plan) -> list[str]:
    return [f"The peak of {name} is in {moment_words(rank.peak)}." for name, rank in rank_kinds(plan)]
