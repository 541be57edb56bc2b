"""The largest size that fits: of a block, a batch or a model. Each size tried is planned like any other job.

Memory grows with the size, so bracketing finds the last size that fits before the first that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from finetune.errors import RequestError
from finetune.plan.job import Job
from finetune.plan.machine import Machine
from finetune.plan.plan import Plan, fullness, plan
from finetune.plan.search import Candidate, Limits, bases, laid_out
from finetune.plan.write import flags_of, shared_by
from finetune.run.flags.groups import GROUPS

ABOVE = 2  # sizes to try above the boundary found: a model with more parameters can need less memory
AS_ASKED = "as asked"


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
    for layout, laid in _layouts(job_at(sizes[0]), machine, limits):
        job = cache(lambda index, laid=laid: laid(job_at(sizes[index])))
        index = _highest(cache(lambda index, job=job: fullness(job(index), machine)), len(sizes))
        if index is not None:
            found.append((index, Candidate(layout, plan(job(index), machine), None)))
    if not found:
        raise RequestError(
            f"--{question}: nothing fits on {machine.name}, not even {sizes[0]}. Use more ranks or a larger "
            f"GPU{'' if limits else ', or let the plan choose the layout'}. To see why, drop --{question}."
        )
    found.sort(key=lambda one: (-one[0], -one[1].samples_per_second))
    index, best = found[0]
    one, shared = best.plan.job, shared_by(job_at(sizes[0]))
    asked = ("", True) if limits is None else (best.layout, limits.has_disk)
    flags = flags_of(one, *asked, shared)
    flags += f" --per_device_eval_batch_size {best.plan.job.eval_batch}" if best.plan.job.eval_batch else ""
    flags += f" --{flag} {sizes[index]}" if flag else ""
    beyond = sizes[index + 1] if index + 1 < len(sizes) else None
    return Answer(question, tuple((sizes[index], one) for index, one in found), beyond, flags)


def _layouts(job: Job, machine: Machine, limits: Limits | None) -> Iterator[tuple[str, Callable[[Job], Job]]]:
    if limits is None:
        yield AS_ASKED, lambda one: one
        return
    for layout, base in bases(job, machine, limits):
        yield layout, partial(_laid, layout, base)


def _laid(layout: str, base: Job, job: Job) -> Job:
    changes = {name: getattr(base, name) for name in ("checkpoint_interval", *GROUPS)}
    return replace(laid_out(job, layout), **changes)


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
