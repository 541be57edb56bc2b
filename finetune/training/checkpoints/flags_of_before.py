"""Compares a resumed run's flags with those of its checkpoint. Never imports torch, so that it can refuse quickly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.run.conflicts import BY_METRIC
from finetune.run.flags.adapter import PURE
from finetune.run.on_resume import APPLIED, COMPARED, NEVER, VALUES, named
from finetune.run.run import Run
from finetune.training.checkpoints.identity import Identity, of_another_run, read_identity, read_run, shown
from finetune.training.checkpoints.manifest import checkpoints_in, problems

OF_SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
BY_MACHINE = {"bf16", "fp16"}  # defaults that depend on the machine


def look_at_flags(run: Run) -> None:
    """Raises RequestError as `course_of` will, for the checkpoint that --resume most likely means. One that does not
    verify, or belongs to another run, is left for later."""
    resume = run.value("resume")
    if not resume:
        return
    folder = Path(run.value("output_dir")).expanduser()
    try:
        own = read_run(folder)
        named = checkpoints_in(folder) if resume in ("auto", "allow") else [Path(resume).expanduser()]
        whole = (path for path in named if not problems(path, hashes=False) and not of_another_run(path, own))
        path = next(whole, None)
        before = read_identity(path) if path else None
    except RequestError:  # reported when the checkpoint is chosen
        return
    if path is not None and before is not None:
        refuse_changed(run, path.name, changed_flags(before, compared_flags(run)))


def compared_flags(run: Run) -> dict[str, Any]:
    """The flags that are compared by value, except those whose default depends on the machine."""
    compared = named(run.recipe.flags, COMPARED) - BY_MACHINE
    found = {name: run.value(name) for name in run.recipe.flags if name in compared}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def changed_flags(before: Identity, flags: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The changed flags, each with its value before and now."""
    known = {flag: value for flag, value in before.flags.items() if flag in flags}
    return {flag: (value, flags[flag]) for flag, value in known.items() if value != flags[flag]}


def refuse_changed(run: Run, name: str, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises RequestError for changes that are not allowed; `name` is the checkpoint's."""
    allowed = (APPLIED, VALUES) if run.value("resume_changed") == "allow" else (APPLIED,)
    refused = set(changed) - named(run.recipe.flags, allowed)
    if not run.value("use_peft") and set(changed.get("dtype", ())) & {"bfloat16", PURE}:
        refused.add("dtype")  # the optimizer states fit the old dtype; if they lack Kahan sums, nobody would notice
    lines = [
        f"--{flag} was {shown(before)} when {name} was saved, and is {shown(now)} ({run.source(flag)})"
        for flag, (before, now) in changed.items()
        if flag in refused
    ]
    kinds = changed.get("lr_scheduler_type", (run.value("lr_scheduler_type"),))
    by_history = next((kind for kind in kinds if str(kind) in BY_METRIC), None)
    if by_history is not None:
        others = [flag for flag in OF_SCHEDULE if flag in changed]
        lines += [f"--{flag} has changed, and {by_history}'s rates depend on the run so far" for flag in others]
    if lines:
        of_past = by_history is not None and any(flag in changed for flag in OF_SCHEDULE)
        never = of_past or bool(refused & {"dtype", *named(run.recipe.flags, (NEVER,))})
        mends = (
            "or another --output_dir"
            if never
            else "another --output_dir, or accept the change with --resume_changed allow"
        )
        raise RequestError(
            f"--resume: {'; '.join(lines)}. A run resumes with the flags it had: give the earlier values, {mends}."
        )
