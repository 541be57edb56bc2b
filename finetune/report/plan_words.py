"""Sentences about a plan; its kinds of memory and of ranks, in the order of tables and charts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from finetune.errors import plain
from finetune.plan.engines.resident import BUCKETS, GATHERED, GRADIENTS, MASTERS, PARAMETERS, PIPE, STATES
from finetune.plan.families.no_text import NO_TEXT
from finetune.plan.job import FSDP, PIPELINE, TRAINER
from finetune.plan.memory import BATCH, BUFFERS, COPIED, SAVED, WORKSPACE
from finetune.plan.program import ACTIVATIONS, GRADIENTS_FLOW, TEMPORARY
from finetune.report.text import count_words, gib, number, seconds_words

if TYPE_CHECKING:
    from finetune.plan.memory import RankMemory
    from finetune.plan.plan import Plan
    from finetune.plan.step import Moment

# In stacking order, from permanent to transient. Any two are at least 18 apart in CIELAB, also for people who lack one
# kind of cone (Machado et al., "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009); a test
# computes it.
COLOURS = {
    PARAMETERS: "#0a4dd4", GATHERED: "#22abf4", MASTERS: "#b376a8", STATES: "#00844a", GRADIENTS: "#db941e",
    BUCKETS: "#882255", PIPE: "#60ea9c", WORKSPACE: "#83ad91", BUFFERS: "#734a9a", BATCH: "#d1cefc",
    ACTIVATIONS: "#b51500", GRADIENTS_FLOW: "#f0e442", TEMPORARY: "#abaa59", SAVED: "#fc36d8",
    COPIED: "#000000",
}  # fmt: skip


def in_order(kinds: Iterable[str]) -> list[str]:
    known = list(COLOURS)
    return sorted(kinds, key=lambda kind: (known.index(kind) if kind in COLOURS else len(known), kind))


def rank_kinds(plan: Plan) -> list[tuple[str, RankMemory]]:
    """Ranks by name; adjacent ones with the same memory are grouped, even if only one of them saves weights."""
    groups: list[list[RankMemory]] = []
    for rank in plan.ranks:
        if groups and _held(groups[-1][0]) == _held(rank):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    word = "stage" if plan.job.stages > 1 else "rank"
    names = [f"{word} {one[0].rank}" if len(one) == 1 else f"{word}s {one[0].rank}-{one[-1].rank}" for one in groups]
    return [(name, max(one, key=lambda rank: rank.host_bytes)) for name, one in zip(names, groups, strict=True)]


def _held(rank: RankMemory) -> tuple[object, ...]:
    return rank.resident, rank.peak, rank.host


def fills_host(plan: Plan) -> bool:
    """Whether host memory is worth a table: with offload, or if it exceeds a tenth of the limit."""
    return any(any(rank.host.values()) for rank in plan.ranks) or plan.host_bytes > plan.host_limit_bytes / 10


def headline(plan: Plan) -> str:
    job, model = plan.job, plan.job.model
    of_tokens = "" if job.model.family in NO_TEXT else f" of {job.tokens:,} tokens"
    of_tokens += f" to {job.targets:,}" if job.targets else ""
    batch = f"micro-batch {job.micro_batch}{of_tokens}"
    batch += f", accumulation {job.accumulation}" if job.accumulation > 1 else ""
    more = f", {job.stages} stages" if job.stages > 1 else ""
    more += f", {job.sequence_parallel_size} of them per text" if job.sequence_parallel_size > 1 else ""
    more += ", activation checkpointing" if job.checkpoint_interval else ""
    samples = "sample" if job.global_batch == 1 else "samples"
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size:,} ranks"
    return plain(
        f"{model.family}, {count_words(model.parameters)} parameters, {job.precision}, {engine_words(plan)} on {ranks} "
        f"of {plan.machine.name}{more}, {batch}; {job.global_batch:,} {samples} per step."
    )


def verdict(plan: Plan) -> str:
    room = plan.limit_bytes - plan.peak_bytes
    held = f"{gib(plan.peak_bytes)} of {gib(plan.limit_bytes)} GiB at the peak"
    if room < 0:
        return f"It does not fit: {held}, {gib(-room)} GiB too much."
    if not plan.fits:
        return f"It does not fit: {gib(plan.host_bytes)} GiB of host memory per node, of {gib(plan.host_limit_bytes)}."
    return f"It fits: {held} ({plan.peak_bytes / plan.limit_bytes:.0%}), {gib(room)} GiB are left."


def engine_words(plan: Plan) -> str:
    job = plan.job
    if job.engine == PIPELINE:
        return f"a pipeline with ZeRO-{job.zero.stage}"
    if job.engine == FSDP:
        return "FSDP"
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
            f"Collectives take {seconds_words(seconds.communication)} in total; computation hides "
            f"{seconds_words(hidden)} of it."
        )
    if plan.host_bytes and not fills_host(plan):
        lines.append(f"On the host: up to {gib(plan.host_bytes)} of {gib(plan.host_limit_bytes)} GiB per node.")
    return lines


def moment_words(moment: Moment) -> str:
    return plain(f"{moment.phase}, {moment.where}" if moment.where else moment.phase)
