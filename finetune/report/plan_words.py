"""Sentences about a plan, and its answer, which is printed first; its kinds of memory and of ranks, in the order of
tables and charts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from finetune.errors import plain
from finetune.plan.answers import AS_ASKED, error_of, speedup_of
from finetune.plan.engines.resident import BUCKETS, GATHERED, GRADIENTS, MASTERS, PARAMETERS, PIPE, STATES
from finetune.plan.job import FSDP, PIPELINE, TRAINER
from finetune.plan.memory import BATCH, BUFFERS, COPIED, SAVED, WORKSPACE
from finetune.plan.program import ACTIVATIONS, GRADIENTS_FLOW, TEMPORARY
from finetune.report.table import Table, print_table, say
from finetune.report.text import count_words, gib, number, seconds_words

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.plan.answers import Answer, Cost
    from finetune.plan.memory import RankMemory
    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate
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
    groups = [list(ranks) for _, ranks in groupby(plan.ranks, key=lambda rank: (rank.resident, rank.peak, rank.host))]
    word = "stage" if plan.job.stages > 1 else "rank"
    names = [f"{word} {one[0].rank}" if len(one) == 1 else f"{word}s {one[0].rank}-{one[-1].rank}" for one in groups]
    return [(name, max(one, key=lambda rank: rank.host_bytes)) for name, one in zip(names, groups, strict=True)]


def fills_host(plan: Plan) -> bool:
    """Whether host memory is worth a table: with offload, or if it exceeds a tenth of the limit."""
    return any(any(rank.host.values()) for rank in plan.ranks) or plan.host_bytes > plan.host_limit_bytes / 10


def headline(plan: Plan) -> str:
    job, model = plan.job, plan.job.model
    of_tokens = f" of {job.tokens:,} tokens" if model.reads_text else ""
    of_tokens += f" to {job.targets:,}" if job.targets else ""
    batch = f"micro-batch {job.micro_batch}{of_tokens}"
    batch += f", accumulation {job.accumulation}" if job.accumulation > 1 else ""
    more = f", {job.stages} stages" if job.stages > 1 else ""
    more += f", {job.sequence_parallel_size} of them per text" if job.sequence_parallel_size > 1 else ""
    more += f", experts over {job.expert_parallel_size} of them" if job.expert_parallel_size > 1 else ""
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
        return f"It does not fit: {held}, {gib(-room)} GiB too much.{_training_words(plan)}"
    if not plan.fits:
        return f"It does not fit: {gib(plan.host_bytes)} GiB of host memory per node, of {gib(plan.host_limit_bytes)}."
    share = f"{plan.peak_bytes / plan.limit_bytes:.0%}"
    return f"It fits: {held} ({share}), {gib(room)} GiB are left.{_training_words(plan)}"


def _training_words(plan: Plan) -> str:
    """What training alone takes, if evaluation takes more: it keeps no activations, but its batch is larger."""
    training = max(rank.step_peak.bytes for rank in plan.ranks)
    if plan.fullest.peak.phase != "evaluation" or training == plan.peak_bytes:
        return ""
    return f" The peak is in evaluation, with a batch of {plan.job.eval_batch}; training peaks at {gib(training)} GiB."


def fits_with(way_out: Candidate) -> str:
    plan = way_out.plan
    on_host = f", {gib(plan.host_bytes)} GiB of host memory per node" if fills_host(plan) else ""
    rate = number(way_out.samples_per_second)
    return f"fits with {way_out.layout}: {gib(plan.peak_bytes)} GiB{on_host}, {rate} samples/s"


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
    if plan.machine.device != "cpu" and plan.peak_bytes <= plan.limit_bytes:
        tool = "rocm-smi" if plan.machine.device == "rocm" else "nvidia-smi"
        size = gib(plan.device_bytes)
        lines.append(f"{tool} will show about {size} GiB, more if lengths vary: freed memory stays reserved.")
    if plan.host_bytes and not fills_host(plan):
        lines.append(f"On the host: up to {gib(plan.host_bytes)} of {gib(plan.host_limit_bytes)} GiB per node.")
    return lines


def moment_words(moment: Moment) -> str:
    return plain(f"{moment.phase}, {moment.where}" if moment.where else moment.phase)


SP, EP = "SP", "EP"  # ranks per text, and per set of experts
# By question: the answer; the next size, which fails; and what to print if there is none.
WORDS = {
    "longest": ("The longest block that fits: {} tokens", "{} do not fit", "The model reads no more than that"),
    "largest_batch": ("The largest batch that fits: {} samples per rank", "{} do not fit", "None larger was tried"),
    "largest_model": ("The largest known model that fits: {}", "{} does not", "No larger one is known"),
    "deadline": (
        "The smallest cluster for the deadline: {} rank(s)",
        "{} would not be enough",
        "None is smaller",
    ),
}


def lines_of(plan: Plan, answer: Answer | None, cost: Cost | None, one_more: Plan | None) -> list[str]:
    lines = [answer_line(answer), f"  flags to add: {answer.flags}"] if answer is not None else []
    lines += [] if cost is None else [cost_line(cost)]
    return lines + ([] if one_more is None else [one_more_line(plan, one_more)])


def show_answer(console: Console, answer: Answer | None, lines: list[str]) -> None:
    for line in lines:
        say(console, line, None if line.startswith(" ") else "bold")
    if answer is not None and len(answer.options) > 1:
        rows = tuple((_said(size), *_cells(one)) for size, one in answer.options)
        columns = ("largest", "layout", "ckpt", SP, EP, "peak GiB", "host GiB per node", "speed")
        table = Table("By layout", columns, rows, texts=("layout",))
        print_table(console, table.unusual({SP: "1", EP: "1"}).fitted(console.width))
    if lines:
        console.print()


def answer_line(answer: Answer) -> str:
    best, plan, (found, beyond, end) = answer.options[0][1], answer.plan, WORDS[answer.question]
    device, host, speed = _cells(best)[-3:]
    parameters = f"{count_words(plan.job.model.parameters)} parameters"
    if answer.hours is None:
        hours, margin = "", ""
    else:
        hours = f" in {number(answer.hours)} hours, {plan.job.global_batch:,} samples per step"
        margin = f" These are planned hours, for the training steps only: {error_of(plan.machine)}."
    spared = " Activation checkpointing was not tried." * (best.layout == AS_ASKED and not plan.job.checkpoint_interval)
    return (
        f"{found.format(_said(answer.found))}{hours} ({best.words}; {parameters}): {device} of {gib(plan.limit_bytes)} "
        f"GiB, {host} of {gib(plan.host_limit_bytes)} GiB on each host, {speed}. "
        f"{end if answer.next is None else beyond.format(_said(answer.next))}.{spared}{margin}"
    )


def _cells(one: Candidate) -> tuple[str, ...]:
    job, speed, is_text = one.plan.job, one.samples_per_second, one.plan.job.model.reads_text
    said = f"{number(speed * job.sample_tokens)} tokens/s" if is_text else f"{number(speed)} samples/s"
    ckpt = "yes" if job.checkpoint_interval else "no"
    held = gib(one.plan.peak_bytes), gib(one.plan.host_bytes)
    return one.name, ckpt, str(job.sequence_parallel_size), str(job.expert_parallel_size), *held, said


def _said(size: int | str) -> str:
    return size if isinstance(size, str) else f"{size:,}"


def cost_line(cost: Cost) -> str:
    told = "" if cost.is_told else " (assumed; --max_steps sets them)"
    energy = "" if cost.most_kwh is None else f", at most {number(cost.most_kwh)} kWh at full board power"
    return (
        f"{cost.steps:,} steps{told} cost about {cost.price:,.2f} at {cost.price_per_gpu_hour:g} per GPU-hour: "
        f"{number(cost.gpu_hours)} GPU-hours, {number(cost.hours)} hours{energy}. This is an estimate "
        f"for the training steps only: {cost.error}."
    )


def one_more_line(plan: Plan, more: Plan) -> str:
    job, before, faster = more.job, plan.job.world_size, speedup_of(plan, more)
    added = job.world_size - before
    head = "One more GPU" if added == 1 else f"{added} more GPUs, the fewest that this layout can add"
    far = ", on another node" if job.world_size > job.ranks_per_node else ""
    return (
        f"{head} ({job.world_size:,} in all{far}): {faster:.2f}x the samples/s, {job.global_batch:,} samples per step, "
        f"{job.world_size / before / faster:.2f}x the price per sample; {gib(more.peak_bytes)} of "
        f"{gib(more.limit_bytes)} GiB{'' if more.fits else ', which does not fit'}."
    )
