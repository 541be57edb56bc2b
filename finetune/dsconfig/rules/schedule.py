"""DS307 to 312: the learning-rate schedule. The schema checks the range of each single number."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, warning
from finetune.dsconfig.rules.optimizer import is_left
from finetune.dsconfig.shape import schema
from finetune.errors import or_meant

OF_DEEPSPEED = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
WHOLE = ("warmup_num_steps", "lr_range_test_step_size", "total_steps", "T_0", "T_mult")
PAIRS = (
    ("warmup_min_lr", "warmup_max_lr"),
    ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"),
    ("base_lr", "max_lr"),
)
SCHEDULES = {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"}


def schedule_is_the_one_asked_for(config: Config, run: Context) -> Iterator[Finding]:
    """DS307. A scheduler section silently overrides --lr_scheduler_type; in a recipe, one that sets no number yields to
    the flag."""
    found = config.get("scheduler.type")
    asked = run.arguments.get("lr_scheduler_type")
    if not isinstance(found, str) or asked is None:
        return
    if is_left(config, run, "scheduler"):
        if found == "WarmupLR" and asked not in ("constant_with_warmup", "constant"):
            said = (
                f"scheduler.type is WarmupLR without any numbers, so the run's --lr_scheduler_type {asked} is "
                "used, which does not stay at the full rate. Give --lr_scheduler_type constant_with_warmup for that."
            )
            yield warning("DS307", "scheduler.type", said)
    elif found != SCHEDULES.get(str(asked)):
        said = (
            f"scheduler.type is {found}, but the run asks for --lr_scheduler_type {asked}, which DeepSpeed would "
            "ignore. Delete the section, and the Trainer's own schedule is used."
        )
        yield error("DS307", "scheduler.type", said, Drop(at("scheduler")))


def schedule_has_its_optimizer(config: Config, run: Context) -> Iterator[Finding]:
    """DS308. Which of the two sections may be given alone depends on who reads the file."""
    has = {name: bool(config.section(name)) for name in ("optimizer", "scheduler")}
    if run.engine == "accelerate" and has["optimizer"] and not has["scheduler"]:
        said = (
            "the file has an optimizer but no scheduler: accelerate then needs DummyOptim in the script, with a "
            "DummyScheduler that has an lr_scheduler_callable, or none. Give both sections, or neither."
        )
        yield warning("DS308", "optimizer", said)
    if run.engine == "trainer" and has["scheduler"] and not has["optimizer"]:
        said = (
            "the file has a scheduler but no optimizer: DeepSpeed's schedule then drives the Trainer's "
            "optimizer. Its steps and rates differ from --lr_scheduler_type. Give both sections, or neither."
        )
        yield warning("DS308", "scheduler", said)


def schedule_takes_its_parameters(config: Config, run: Context) -> Iterator[Finding]:
    """DS311. DeepSpeed passes the parameters on unchanged: an unknown one ends the run (runtime/engine.py)."""
    known = schema()["properties"]["scheduler"]["x-params"]
    kind = config.get("scheduler.type")
    if not isinstance(kind, str) or kind == "auto":
        return
    if kind not in known:
        near = difflib.get_close_matches(kind, known, 1, 0.5)
        said = (
            f"scheduler.type is {kind}, which is neither a schedule of DeepSpeed ({', '.join(OF_DEEPSPEED)}) nor a "
            f"class of torch.optim.lr_scheduler.{f' Did you mean {near[0]}?' if near else ''}"
        )
        yield error("DS311", "scheduler.type", said)
        return
    given = config.section("scheduler.params")
    missing = [name for name in schema()["properties"]["scheduler"]["x-required"][kind] if name not in given]
    if missing and missing != ["total_num_steps"]:  # reported by DS310
        yield error(
            "DS311", "scheduler", f"scheduler.type is {kind}, which needs {', '.join(missing)} in its params. Add it."
        )
    for name in given:
        if name not in known[kind]:
            said = (
                f"scheduler.params.{name} is not a parameter of {kind}, which takes {', '.join(known[kind])}."
                f"{or_meant(name, known[kind])}"
            )
            yield error("DS311", f"scheduler.params.{name}", said)


def warmup_fits_the_run(config: Config, run: Context) -> Iterator[Finding]:
    """DS309. deepspeed#771: a warmup of 0 crashed, later was raised to 2, and is refused since 0.19.3."""
    steps = config.number("scheduler.params.warmup_num_steps")
    total = config.count("scheduler.params.total_num_steps")
    place = "scheduler.params.warmup_num_steps"
    deepspeed = run.version("deepspeed")
    does = "refuses" if deepspeed is None or deepspeed >= (0, 19, 3) else "reads as 2"
    if steps is not None and steps <= 0:
        said = (
            f"{place} is {steps:g}, which DeepSpeed {does}. Delete the scheduler section for a run without warmup, or "
            "write at least 1."
        )
        yield error("DS309", place, said)
    known = total or (run.arguments.get("max_steps", 0) if run.has_trainer else 0)
    asked = run.arguments.get("warmup_steps") if config.is_auto(place) or steps is None else steps
    if isinstance(asked, int | float) and isinstance(known, int) and 0 < known < asked:
        contradicts_itself = total and steps is not None  # otherwise it may be intended, as in a short trial run
        said = (
            f"the warmup takes {asked:g} steps, but the run ends after {known}: the full rate is never reached. "
            f"Lower {place if steps is not None else '--warmup_steps'}."
        )
        yield (error if contradicts_itself else warning)("DS309", place if steps is not None else "scheduler", said)


def steps_are_counted_whole(config: Config, run: Context) -> Iterator[Finding]:
    """DS309. `isinstance(steps, int)` in the constructors (deepspeed 0.19.8, runtime/lr_schedules.py; torch 2.13,
    optim/lr_scheduler.py)."""
    for name in WHOLE:
        place = f"scheduler.params.{name}"
        steps = config.number(place)
        if isinstance(steps, float) and steps > 0:
            said = f"{place} is {steps!r}, but {_library(config)} takes only integers there. Write {steps:.0f}."
            yield error("DS309", place, said, *([Put(at(place), int(steps))] if steps == int(steps) else []))


def lowest_is_below_highest(config: Config, run: Context) -> Iterator[Finding]:
    """DS312. A schedule accepts any two numbers (deepspeed 0.19.8, runtime/lr_schedules.py): swapped, the rate falls
    where it should rise."""
    if is_left(config, run, "scheduler"):
        return
    for low, high in PAIRS:
        (lows, by_low), (highs, by_high) = (_bound(config, run, name) for name in (low, high))
        many = max(len(lows), len(highs))
        if min(len(lows), len(highs)) in (1, many) and any(
            one > other for one, other in zip(_of(lows, many), _of(highs, many), strict=True)
        ):
            said = (
                f"scheduler.params.{low} is {_shown(lows)}{by_low}, which is above {high}, {_shown(highs)}{by_high}: "
                "the schedule would run backwards. Lower the first, or raise the second."
            )
            yield error("DS312", f"scheduler.params.{low if config.has(f'scheduler.params.{low}') else high}", said)


def decay_has_its_steps(config: Config, run: Context) -> Iterator[Finding]:
    """DS312. OneCycle skips its decay without them (deepspeed 0.19.8, runtime/lr_schedules.py, _initialize_cycle)."""
    for name in ("decay_lr_rate", "decay_mom_rate"):
        place = f"scheduler.params.{name}"
        if config.number(place) and not config.get("scheduler.params.decay_step_size"):
            said = f"{place} is {config.number(place):g}, but decay_step_size is 0, so nothing decays. Add it."
            yield warning("DS312", place, said)


def schedule_knows_its_end(config: Config, run: Context) -> Iterator[Finding]:
    """DS310. Two schedules cannot be built without the number of steps, which only the Trainer knows."""
    kind = config.get("scheduler.type")
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and not config.has("scheduler.params.total_num_steps"):
        yield error(
            "DS310",
            "scheduler",
            f"scheduler.type is {kind}, which needs total_num_steps in its params. Add it"
            + (': "auto" is the run\'s number of steps.' if run.engine != "deepspeed" else "."),
            *([Put(at("scheduler.params.total_num_steps"), "auto")] if run.engine != "deepspeed" else []),
        )


def _bound(config: Config, run: Context, name: str) -> tuple[list[float], str]:
    """The numbers for each group of weights, and their source if not the file; an empty list if they are unknown."""
    kind, given = str(config.get("scheduler.type")), config.get(f"scheduler.params.{name}")
    default = schema()["properties"]["scheduler"]["x-params"].get(kind, {}).get(name)
    if given == "auto" and name == "warmup_min_lr" and run.engine != "deepspeed":
        return [0.0], ""
    if given is None and default is not None:
        return [default], " (its default)"
    if name == "warmup_max_lr" and given is None and kind == "WarmupLR":  # then the optimizer's rate is used
        given = config.get("optimizer.params.lr") if config.section("optimizer") else "auto"
    if name == "warmup_max_lr" and given == "auto" and run.has_trainer:
        asked = run.arguments.get("learning_rate")
        return ([asked], " (--learning_rate)") if isinstance(asked, int | float) else ([], "")
    numbers = given if isinstance(given, list) else [given]
    return (numbers, "") if all(type(number) in (int, float) for number in numbers) else ([], "")


def _of(numbers: list[float], many: int) -> list[float]:
    return numbers * many if len(numbers) == 1 else numbers


def _shown(numbers: list[float]) -> str:
    return f"{numbers[0]:g}" if len(numbers) == 1 else str(numbers)


def _library(config: Config) -> str:
    return "DeepSpeed" if config.get("scheduler.type") in OF_DEEPSPEED else "torch"
