"""From a command line to a run: the one function that resolves a request, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from finetune.errors import RequestError
from finetune.run.checks import found_wrong, others, within_range
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.launch import Launch
from finetune.run.parse import Setting, settings_of
from finetune.run.recipe import ENGINE_FLAG, PIPELINE, Recipe
from finetune.run.run import Run
from finetune.run.void import settle_void


def resolve(recipe: Recipe, argv: Sequence[str], launch: Launch, is_here: bool = True) -> Run:
    """The run that a command line, or a list of flags like it, describes. Raises RequestError with all errors that show
    in the flags. Unless `is_here`, the run may need packages and data that this machine lacks."""
    run, typos, mistakes = read_flags(recipe, argv, launch, is_here)
    refuse([*typos, *others(mistakes, typos)])
    return run


def read_flags(recipe: Recipe, argv: Sequence[str], launch: Launch, is_here: bool) -> tuple[Run, list[str], list[str]]:
    """The run without invalid values; the messages about those; and all other mistakes in the flags."""
    refused = PipelineArguments.refused if recipe.engines == (PIPELINE,) else {}
    given, typos = settings_of(argv, recipe.flags, refused, recipe.name, recipe.reads)
    run = Run(recipe, launch, tuple(argv), {**_defaults(recipe, given), **given})
    of_other_engine = list(_of_other_engine(run))
    run, void = settle_void(run)
    run, out_of_range = within_range(run)
    return run, [*typos, *out_of_range], [*of_other_engine, *void, *found_wrong(run, is_here)]


def refuse(mistakes: Sequence[str]) -> None:
    """Raises RequestError with all of them, if any."""
    if mistakes:
        raise RequestError("\n".join(mistakes))


def _defaults(recipe: Recipe, given: Mapping[str, Setting]) -> dict[str, Setting]:
    """The recipe's defaults, and those that follow from the given flags."""
    layers: list[tuple[str, Mapping[str, Any]]] = [(f"default of {recipe.script}", recipe.defaults)]
    if _is_on(given, "early_stopping_patience"):
        # --metric_for_best_model decides what "best" is.
        follows: dict[str, Any] = {"load_best_model_at_end": True}
        if "load_best_model_at_end" in given and not _is_on(given, "load_best_model_at_end"):
            follows["metric_for_best_model"] = "loss"  # otherwise the Trainer sets it itself
        layers.append(("follows from --early_stopping_patience", follows))
    if _is_on(given, "push_to_hub"):
        # Push once, with the model card; and private, so that no data become public unasked.
        layers.append(("follows from --push_to_hub", {"hub_private_repo": True, "hub_strategy": "end"}))
    if not _is_on(given, "model_name_or_path"):
        layers.append((f"default of {recipe.script} for a model from scratch", recipe.scratch_defaults))
    return {name: Setting(value, source, False) for source, layer in layers for name, value in layer.items()}


def _is_on(given: Mapping[str, Setting], name: str) -> bool:
    return name in given and bool(given[name].value)


def _of_other_engine(run: Run) -> Iterator[str]:
    """Flags of the engine that this run does not use: they would be ignored silently."""
    recipe = run.recipe
    if run.stages is not None or not recipe.pipeline_groups:
        return
    own = {f.name for group in (*recipe.groups, *recipe.trainer_groups) for f in fields(group)}
    of_pipeline = [f.name for group in recipe.pipeline_groups for f in fields(group) if f.name not in own]
    for name in (name for name in of_pipeline if name in run.given):
        yield f"{run.said(name)}, but it is for a pipeline. Add --{ENGINE_FLAG}, or drop it."
