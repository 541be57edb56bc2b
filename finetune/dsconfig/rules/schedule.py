"""DS307 to 311: the schedule of the learning rate."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, warning
from finetune.dsconfig.rules.optimizer import is_left
from finetune.dsconfig.shape import schema

OF_DEEPSPEED = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
SCHEDULES = {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"}


def schedule_is_the_one_asked_for(config: Config, run: Context) -> Iterator[Finding]:
    """DS307. A scheduler section wins over --lr_scheduler_type without a word; under a recipe, one that fixes no number
    gives way to it."""
    found = config.get("scheduler.type")
    asked = run.arguments.get("lr_scheduler_type")
    if not isinstance(found, str) or asked is None:
        return
    if is_left(config, run, "scheduler"):
        if found == "WarmupLR" and asked not in ("constant_with_warmup", "constant"):
            yield warning(
                "DS307",
                "scheduler.type",
                f"scheduler.type is WarmupLR with no number of its own, so the run's --lr_scheduler_type {asked} is "
                "used, which does not stay at the full rate. Give --lr_scheduler_type constant_with_warmup for that.",
            )
    elif found != SCHEDULES.get(str(asked)):
        yield error(
            "DS307",
            "scheduler.type",
            f"scheduler.type is {found}, but the run asks for --lr_scheduler_type {asked}, which DeepSpeed would "
            "ignore. Delete the section, and the Trainer's own schedule is used.",
            Drop(at("scheduler")),
        )


def schedule_has_its_optimizer(config: Config, run: Context) -> Iterator[Finding]:
    """DS308. Which of the two may come from the file alone depends on who reads it."""
    has = {name: bool(config.section(name)) for name in ("optimizer", "scheduler")}
    if run.engine == "accelerate" and has["optimizer"] and not has["scheduler"]:
        yield warning(
            "DS308",
            "optimizer",
            "optimizer is in the file and scheduler is not: accelerate then takes DummyOptim in the script, with a "
            "DummyScheduler that has an lr_scheduler_callable, or none. Give both sections, or neither.",
        )
    if run.engine == "trainer" and has["scheduler"] and not has["optimizer"]:
        yield warning(
            "DS308",
            "scheduler",
            "scheduler is in the file and optimizer is not: DeepSpeed's schedule then drives the Trainer's "
            "optimizer. Its steps and rates are not those of --lr_scheduler_type. Give both sections, or neither.",
        )


def schedule_takes_its_parameters(config: Config, run: Context) -> Iterator[Finding]:
    """DS311. DeepSpeed hands the parameters on as they are: an unknown one ends the run (runtime/engine.py)."""
    known = schema()["properties"]["scheduler"]["x-params"]
    kind = config.get("scheduler.type")
    if not isinstance(kind, str) or kind == "auto":
        return
    if kind not in known:
        near = difflib.get_close_matches(kind, known, 1, 0.5)
        yield error(
            "DS311",
            "scheduler.type",
            f"scheduler.type is {kind}, which is neither a schedule of DeepSpeed ({', '.join(OF_DEEPSPEED)}) nor a "
            f"class of torch.optim.lr_scheduler.{f' Did you mean {near[0]}?' if near else ''}",
        )
        return
    given = config.section("scheduler.params")
    missing = [name for name in schema()["properties"]["scheduler"]["x-required"][kind] if name not in given]
    if missing and missing != ["total_num_steps"]:  # of which DS310 speaks
        yield error(
            "DS311", "scheduler", f"scheduler.type is {kind}, which needs {', '.join(missing)} in its params. Add it."
        )
    for name in given:
        if name not in known[kind]:
            near = difflib.get_close_matches(name, known[kind], 1)
            yield error(
                "DS311",
                f"scheduler.params.{name}",
                f"scheduler.params.{name} is no parameter of {kind}, which takes {', '.join(known[kind])}."
                f"{f' Did you mean {near[0]}?' if near else ''}",
            )


def warmup_fits_the_run(config: Config, run: Context) -> Iterator[Finding]:
    """DS309. deepspeed#771: a warm-up of 0 broke, was raised to 2, and is refused since 0.19.3."""
    steps = config.number("scheduler.params.warmup_num_steps")
    total = config.count("scheduler.params.total_num_steps")
    place = "scheduler.params.warmup_num_steps"
    deepspeed = run.version("deepspeed")
    does = "refuses" if deepspeed is None or deepspeed >= (0, 19, 3) else "takes for 2"
    if steps is not None and steps <= 0:
        yield error(
            "DS309",
            place,
            f"{place} is {steps:g}, which DeepSpeed {does}. Delete the scheduler section for a run without warm-up, or "
            "write at least 1.",
        )
    if isinstance(steps, float) and steps > 0:
        yield error(
            "DS309",
            place,
            f"{place} is {steps!r}, but DeepSpeed takes no number with a point or an exponent there. Write "
            f"{steps:.0f}.",
            *([Put(at(place), int(steps))] if steps == int(steps) else []),
        )
    known = total or (run.arguments.get("max_steps", 0) if run.has_trainer else 0)
    asked = run.arguments.get("warmup_steps") if config.is_auto(place) or steps is None else steps
    if isinstance(asked, int | float) and isinstance(known, int) and 0 < known < asked:
        contradicts_itself = total and steps is not None  # otherwise a short trial run may mean it
        yield (error if contradicts_itself else warning)(
            "DS309",
            place if steps is not None else "scheduler",
            f"the warm-up takes {asked:g} steps, but the run ends after {known}: the full rate is never reached. "
            f"Lower {place if steps is not None else '--warmup_steps'}.",
        )


def schedule_knows_its_end(config: Config, run: Context) -> Iterator[Finding]:
    """DS310. Two schedules cannot be built without the number of steps, which the Trainer alone knows."""
    kind = config.get("scheduler.type")
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and not config.has("scheduler.params.total_num_steps"):
        yield error(
            "DS310",
            "scheduler",
            f"scheduler.type is {kind}, which needs total_num_steps in its params. Add it"
            + (': "auto" is the number of steps of the run.' if run.engine != "deepspeed" else "."),
            *([Put(at("scheduler.params.total_num_steps"), "auto")] if run.engine != "deepspeed" else []),
        )


RULES = (
    schedule_is_the_one_asked_for,
    schedule_has_its_optimizer,
    schedule_takes_its_parameters,
    warmup_fits_the_run,
    schedule_knows_its_end,
)
