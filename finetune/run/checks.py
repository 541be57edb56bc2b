"""Checks of a run that need only its flags, made before anything heavy is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from finetune.errors import RequestError
from finetune.run.conflicts import conflicts, missing
from finetune.run.engine import deepspeed_by_accelerate
from finetune.run.facts import check_scratch
from finetune.run.flags.compression import check_comm_hook
from finetune.run.flags.expert_parallel import expert_faults, expert_faults_here, look_at_experts
from finetune.run.flags.experts import look_at_router
from finetune.run.flags.guards import guard_faults
from finetune.run.flags.pipeline import look_at_kind, pipeline_faults
from finetune.run.flags.profiling import check_profile
from finetune.run.flags.sequence_parallel import look_at_heads, look_at_mlps, sequence_faults, sequence_faults_here
from finetune.run.launch import meeting_faults
from finetune.run.optimizer import missing_package
from finetune.run.output_dir import missing_checkpoint
from finetune.run.paths import missing_inputs
from finetune.run.trackers import check_trackers
from finetune.run.void import void_here

if TYPE_CHECKING:
    from finetune.run.run import Run


FLAG = re.compile(r"--(\w+)")


def raised_by(*checks: Callable[[], object]) -> Iterator[str]:
    """The message of each check that raises RequestError."""
    for one in checks:
        try:
            one()
        except RequestError as error:
            yield str(error)


def others(found: Iterable[str], mistakes: Sequence[str]) -> list[str]:
    """The messages that share no flag with any of `mistakes`: a mistyped flag may be the one they report as missing."""
    named = set(FLAG.findall("\n".join(mistakes)))
    return [one for one in dict.fromkeys(found) if not named.intersection(FLAG.findall(one))]


def within_range(run: Run) -> tuple[Run, list[str]]:
    """The run without its out-of-range numbers, because other checks rely on valid ones, and the errors about them."""
    wrong = dict(_out_of_range(run))
    settings = {name: one for name, one in run.settings.items() if name not in wrong}
    return replace(run, settings=settings), list(wrong.values())


def _out_of_range(run: Run) -> Iterator[tuple[str, str]]:
    for flag in run.recipe.flags.values():
        value = run.value(flag.name)
        values = value if isinstance(value, list) else [value]
        if flag.range is not None and not all(one is None or flag.range.holds(one) for one in values):
            finite = " and finite" if isinstance(value, float) and math.isinf(value) else ""
            yield flag.name, f"{run.said(flag.name)}, but it must be {flag.range}{finite}."


def found_wrong(run: Run, is_here: bool) -> Iterator[str]:
    """Flags that contradict each other, what the engine or the launch cannot do, and, for a run that is to start here,
    what it needs and was not given."""
    yield from conflicts(run)
    if is_here:
        yield from missing(run)
        yield from missing_checkpoint(run)
        yield from raised_by(lambda: check_scratch(run))
        yield from missing_package(run)
    yield from pipeline_faults(run) if run.stages is not None else group_faults(run)
    yield from guard_faults(run)
    yield from raised_by(*(partial(look, run) for look in (look_at_kind, look_at_mlps, look_at_router)))


def group_faults(run: Run) -> Iterator[str]:
    """What ranks cannot do that share texts, or hold experts together: by the flags, and by the model's config, if it
    is on this machine."""
    yield from sequence_faults(run)
    yield from expert_faults(run)
    yield from raised_by(partial(look_at_heads, run), partial(look_at_experts, run))


def found_wrong_here(run: Run, deepspeed: str | None) -> Iterator[str]:
    """Further checks of a run that is to start on this machine, with the DeepSpeed config of that name, if any."""
    yield from missing_inputs(run)
    yield from void_here(run, deepspeed)
    engine = deepspeed or (deepspeed_by_accelerate(run) and "by accelerate") or None
    yield from sequence_faults_here(run, engine)
    yield from expert_faults_here(run, engine)
    yield from _of_disabled(run)
    yield from meeting_faults(run.launch)
    asked = {name: run.given.get(name) is True for name in ("bf16", "fp16")}
    yield from raised_by(
        lambda: check_trackers(_listed(run.value("report_to")), source=run.source("report_to")),
        lambda: check_profile(run, deepspeed, None),
        lambda: check_comm_hook(run, deepspeed, asked),
    )


def _of_disabled(run: Run) -> Iterator[str]:
    for code in run.value("disable_check") or ():
        if not re.fullmatch(r"DS\d{3}", code):
            yield f"{run.said('disable_check')}, but {code} is not a code such as DS902. docs/check.md lists them."
            return


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]
