"""From a command line to a run: the one function that settles what was asked for, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from finetune.errors import RequestError
from finetune.run.accelerate_plugin import check_fields, config_of_fields
from finetune.run.checks import found_wrong, found_wrong_here, others, raised_by, within_range
from finetune.run.engine import (
    context_of,
    deepspeed_by_accelerate,
    deepspeed_config_of,
    load_deepspeed,
    refuse_batch_search,
    refuse_unused_disk,
    settle_engine,
)
from finetune.run.environment import left_over, obeyed
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.launch import Launch
from finetune.run.output_folder import check_output_dir
from finetune.run.parse import Setting, settings_of
from finetune.run.rates import vain_rates
from finetune.run.recipe import ENGINE_FLAG, PIPELINE, Recipe
from finetune.run.run import Run
from finetune.run.void import settle_void


def resolve(recipe: Recipe, argv: Sequence[str], launch: Launch, is_here: bool = True) -> Run:
    """The run that a command line, or flags in its form, describes. Raises RequestError with all that is wrong with it,
    as far as flags tell. A run that is not to be on this machine may want packages and data that it lacks."""
    run, typos, mistakes = _read(recipe, argv, launch, is_here)
    _refuse([*typos, *others(mistakes, typos)])
    return run


def resolve_here(recipe: Recipe, argv: Sequence[str], launch: Launch) -> Run:
    """`resolve` for a run that is to start on this machine now: its files, its folders and its DeepSpeed config are
    looked at, too. Raises RequestError."""
    run, typos, mistakes = _read(recipe, argv, launch, is_here=True)
    asked: str | None = None
    try:
        run = settle_engine(run)
        asked = deepspeed_config_of(run)
    except RequestError as error:
        typos += others([str(error)], typos)  # what is said of another engine would be wrong, too
    run = obeyed(run)
    run = run.noted(*vain_rates(run))
    mistakes += left_over(run, asked)
    mistakes += [*found_wrong_here(run, asked), *raised_by(lambda: _check_deepspeed(run, asked))]
    if launch.speaks:
        # The folder is the last: another one mends no flag.
        mistakes += raised_by(*(partial(look, run) for look in _looks_ahead()), partial(check_output_dir, run))
    _refuse([*typos, *others(mistakes, typos)])
    return run


def _read(recipe: Recipe, argv: Sequence[str], launch: Launch, is_here: bool) -> tuple[Run, list[str], list[str]]:
    """The run without what cannot be meant; what that was; and what else is wrong with the flags."""
    refused = PipelineArguments.refused if recipe.engines == (PIPELINE,) else {}
    given, typos = settings_of(argv, recipe.flags, refused, recipe.name, recipe.reads)
    run = Run(recipe, launch, tuple(argv), {**_defaults(recipe, given), **given})
    of_other_engine = list(_of_other_engine(run))
    run, void = settle_void(run)
    run, out_of_range = within_range(run)
    return run, [*typos, *out_of_range], [*of_other_engine, *void, *found_wrong(run, is_here)]


def _refuse(mistakes: Sequence[str]) -> None:
    if mistakes:
        raise RequestError("\n".join(mistakes))


def _check_deepspeed(run: Run, asked: str | None) -> None:
    if asked:  # which is checked once more when the GPUs are known
        precision: dict[str, bool] = {name: run.given[name] for name in ("bf16", "fp16") if name in run.given}
        loaded = load_deepspeed(run, asked, context_of(run, precision, has_cuda=None))
        refuse_unused_disk(run, loaded.config, loaded.name)
    elif deepspeed_by_accelerate(run) and run.value("do_train"):
        refuse_batch_search(run, config_of_fields(), "by accelerate")
        check_fields(context_of(run, {}, has_cuda=None, engine="trainer"), tuple(run.value("disable_check") or ()))


def _looks_ahead() -> Sequence[Callable[[Run], None]]:
    """At what lies in files, by rooms that import no torch for it."""
    from finetune.data.first_look import look_at_columns
    from finetune.run.decoders import look_at_model
    from finetune.training.checkpoints.flags_of_before import look_at_flags
    from finetune.training.hub import check_hub

    return look_at_model, look_at_columns, look_at_flags, check_hub


def _defaults(recipe: Recipe, given: Mapping[str, Setting]) -> dict[str, Setting]:
    """The recipe's, and those that follow from what is given."""
    layers: list[tuple[str, Mapping[str, Any]]] = [(f"default of {recipe.script}", recipe.defaults)]
    if _is_on(given, "early_stopping_patience"):
        # What "best" is, --metric_for_best_model says.
        follows: dict[str, Any] = {"load_best_model_at_end": True}
        if "load_best_model_at_end" in given and not _is_on(given, "load_best_model_at_end"):
            follows["metric_for_best_model"] = "loss"  # which the Trainer else takes for itself
        layers.append(("follows from --early_stopping_patience", follows))
    if _is_on(given, "push_to_hub"):
        # Once, with the model card; and nobody's data become public unasked.
        layers.append(("follows from --push_to_hub", {"hub_private_repo": True, "hub_strategy": "end"}))
    if not _is_on(given, "model_name_or_path"):
        layers.append((f"default of {recipe.script} for a model from scratch", recipe.scratch_defaults))
    return {name: Setting(value, source, False) for source, layer in layers for name, value in layer.items()}


def _is_on(given: Mapping[str, Setting], name: str) -> bool:
    return name in given and bool(given[name].value)


def _of_other_engine(run: Run) -> Iterator[str]:
    """Flags of the engine that this run does not have: they would be passed over without a word."""
    recipe = run.recipe
    if run.stages is not None or not recipe.pipeline_groups:
        return
    own = {f.name for group in (*recipe.groups, *recipe.trainer_groups) for f in fields(group)}
    of_pipeline = [f.name for group in recipe.pipeline_groups for f in fields(group) if f.name not in own]
    for name in (name for name in of_pipeline if name in run.given):
        yield f"{run.said(name)}, but it is for a pipeline. Add --{ENGINE_FLAG}, or drop it."
