"""Turn a command line into a run that is about to start on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from finetune.errors import RequestError
from finetune.run.accelerate_plugin import check_fields, config_of_fields
from finetune.run.checks import found_wrong_here, others, raised_by
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
from finetune.run.launch import Launch
from finetune.run.paths import check_output_dir
from finetune.run.rates import vain_rates
from finetune.run.recipe import Recipe
from finetune.run.resolve import read_flags, refuse
from finetune.run.run import Run


def resolve_here(recipe: Recipe, argv: Sequence[str], launch: Launch) -> Run:
    """`resolve` for a run that is about to start on this machine: also checks its files, folders and DeepSpeed config.
    Raises RequestError."""
    run, typos, mistakes = read_flags(recipe, argv, launch, is_here=True)
    asked: str | None = None
    try:
        run = settle_engine(run)
        asked = deepspeed_config_of(run)
    except RequestError as error:
        typos += others([str(error)], typos)  # the engine is unknown, so later checks that depend on it may be wrong
    run = obeyed(run)
    run = run.noted(*vain_rates(run))
    mistakes += left_over(run, asked)
    mistakes += [*found_wrong_here(run, asked), *raised_by(lambda: _check_deepspeed(run, asked))]
    if launch.speaks:
        # The output folder comes last: choosing another one fixes none of the flags.
        mistakes += raised_by(*(partial(look, run) for look in _looks_ahead()), partial(check_output_dir, run))
    refuse([*typos, *others(mistakes, typos)])
    return run


def _check_deepspeed(run: Run, asked: str | None) -> None:
    if asked:  # checked again once the GPUs are known
        precision: dict[str, bool] = {name: run.given[name] for name in ("bf16", "fp16") if name in run.given}
        loaded = load_deepspeed(run, asked, context_of(run, precision, has_cuda=None))
        refuse_unused_disk(run, loaded.config, loaded.name)
    elif deepspeed_by_accelerate(run) and run.value("do_train"):
        refuse_batch_search(run, config_of_fields(), "by accelerate")
        check_fields(context_of(run, {}, has_cuda=None, engine="trainer"), tuple(run.value("disable_check") or ()))


def _looks_ahead() -> Sequence[Callable[[Run], None]]:
    """Checks that read files, from modules that do so without importing torch."""
    from finetune.data.first_look import look_at_columns
    from finetune.run.decoders import look_at_model
    from finetune.run.flags.expert_parallel import look_at_experts
    from finetune.run.flags.sequence_parallel import look_at_heads
    from finetune.training.checkpoints.flags_of_before import look_at_flags
    from finetune.training.hub import check_hub

    return look_at_model, look_at_heads, look_at_experts, look_at_columns, look_at_flags, check_hub
