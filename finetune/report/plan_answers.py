"""What `finetune plan` prints first: the answer in one line, the cost, one more GPU, and a table by layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.plan.cost import speedup_of
from finetune.plan.families.no_text import NO_TEXT
from finetune.report.table import Table, print_table
from finetune.report.text import count_words, gib, number

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.plan.cost import Cost
    from finetune.plan.largest import Answer
    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate

SHARING = "SP"  # ranks per text
# By question: the answer; the next size, which fails; and what to print if there is none.
WORDS = {
    "longest": ("The longest block that fits: {} tokens", "{} do not fit", "The model reads no more than that"),
    "largest_batch": ("The largest batch that fits: {} samples per rank", "{} do not fit", "None larger was tried"),
    "largest_model": ("The largest known model that fits: {}", "{} does not", "No larger one is known"),
    "deadline": ("The smallest cluster that meets the deadline: {} ranks", "{} would not be enough", "None is smaller"),
}


def lines_of(plan: Plan, answer: Answer | None, cost: Cost | None, one_more: Plan | None) -> list[str]:
    lines = [answer_line(answer), f"  flags to add: {answer.flags}"] if answer is not None else []
    lines += [] if cost is None else [cost_line(cost)]
    return lines + ([] if one_more is None else [one_more_line(plan, one_more)])


def show_answer(answer: Answer | None, lines: list[str], console: Console | None = None) -> None:
    from rich.console import Console

    console = console or Console()
    for line in lines:
        console.print(line, style=None if line.startswith(" ") else "bold", markup=False, highlight=False, emoji=False)
    if answer is not None and len(answer.options) > 1:
        rows = tuple((_said(size), *_cells(one)) for size, one in answer.options)
        columns = ("largest", "layout", "ckpt", SHARING, "peak GiB", "host GiB per node", "speed")
        table = Table("By layout", columns, rows, texts=("layout",))
        is_shared = any(one.plan.job.sequence_parallel_size > 1 for _, one in answer.options)
        print_table(console, (table if is_shared else table.without([SHARING])).fitted(console.width))
    if lines:
        console.print()


def answer_line(answer: Answer) -> str:
    best, plan, (found, beyond, end) = answer.options[0][1], answer.plan, WORDS[answer.question]
    device, host, speed = _cells(best)[-3:]
    parameters = f"{count_words(plan.job.model.parameters)} parameters"
    hours = "" if answer.hours is None else f" in {answer.hours:.3g} hours"
    return (
        f"{found.format(_said(answer.found))}{hours} ({best.words}; {parameters}): {device} of {gib(plan.limit_bytes)} "
        f"GiB, {host} of {gib(plan.host_limit_bytes)} GiB on each host, {speed}. "
        f"{end if answer.next is None else beyond.format(_said(answer.next))}."
    )


def _cells(one: Candidate) -> tuple[str, ...]:
    job, speed, is_text = one.plan.job, one.samples_per_second, one.plan.job.model.family not in NO_TEXT
    said = f"{number(speed * job.sample_tokens)} tokens/s" if is_text else f"{number(speed)} samples/s"
    ckpt = "yes" if job.checkpoint_interval else "no"
    held = gib(one.plan.peak_bytes), gib(one.plan.host_bytes)
    return one.name, ckpt, str(job.sequence_parallel_size), *held, said


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
