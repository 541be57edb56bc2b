"""Runs as a command line asks for them, of a recipe that has just the flags of a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.run.flags.common import RunArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.launch import Launch
from finetune.run.recipe import PIPELINE, TRAINER, Recipe
from finetune.run.resolve import resolve
from finetune.run.run import Run

ALONE = Launch()


def run_of(
    *argv: str,
    groups: tuple[type, ...] = (),
    launch: Launch = ALONE,
    pipeline: bool = False,
    scratch: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> Run:
    recipe = Recipe(
        name="test",
        groups=(RunArguments, *groups),
        defaults={"output_dir": "out", "do_train": True, **defaults},
        scratch_defaults=scratch or {},
        engines=(PIPELINE,) if pipeline else (TRAINER,),
        pipeline_groups=(PipelineArguments,) if pipeline else (),
        reads=("other",) if pipeline else (),
    )
    return resolve(recipe, argv, launch)
