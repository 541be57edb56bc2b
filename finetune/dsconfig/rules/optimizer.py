"""DS3xx: the optimizer and the schedule."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, warning
from finetune.dsconfig.shape import schema

# deepspeed 0.19.8, runtime/config.py, DEEPSPEED_OPTIMIZERS; any other name must be a class of torch.optim.
OWN = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
# runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS, by the names that a config gives them.
TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon", "Adam", "AdamW", "Adagrad")
# With an update on the CPU (runtime/engine.py, _configure_basic_optimizer).
ON_CPU = ("adam", "adamw", "adagrad", "lion")
OF_TORCH = (
    "SGD",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
    "Adafactor",
    "LBFGS",
    "SparseAdam",
)
REMOVED = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
REMOVED_IN = (0, 19, 7)

# Constructors of FusedAdam, DeepSpeedCPUAdam and torch.optim.AdamW, and what DeepSpeed takes out before.
OF_EVERY_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "torch_adam", "adam_w_mode")
OF_SOME_ADAM = (
    *("bias_correction", "set_grad_none", "fp32_optimizer_states", "adamw_mode"),
    *("maximize", "foreach", "capturable", "differentiable", "fused"),
)

SCHEDULES_OF_TORCH = (
    "LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR "
    "CosineAnnealingWarmRestarts CyclicLR OneCycleLR ReduceLROnPlateau"
).split()
SCHEDULES = {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"}


def is_left_to_the_trainer(section: dict[str, Any]) -> bool:
    """True for an optimizer or scheduler section that fixes no number: every value is "auto" or a mere switch."""
    known = section.get("type") in ("AdamW", "WarmupLR", "WarmupDecayLR")
    switches = ("torch_adam", "warmup_type", "adam_w_mode")
    params = section.get("params", {})
    return known and isinstance(params, dict) and all(v == "auto" for k, v in params.items() if k not in switches)


def _left(config: Config, run: Context, name: str) -> bool:
    """True where a recipe of ours takes the section out; anybody else's Trainer keeps it."""
    return run.engine == "recipe" and is_left_to_the_trainer(config.section(name))


def optimizer_is_there(config: Config, run: Context) -> Iterator[Finding]:
    """DS301, an optimizer that this DeepSpeed does not have; DS302, one that it had."""
    name = _name(config)
    if name is None and config.section("optimizer").get("params") and not config.has("optimizer.type"):
        yield error(
            "DS301", "optimizer", "optimizer has params and no type: DeepSpeed ignores them. Add a type, or delete it."
        )
    if name is None or name.lower() in OWN:
        return
    version = run.version("deepspeed") or REMOVED_IN
    if name.lower() in REMOVED:
        if version >= REMOVED_IN:
            ours = " The recipes have it without DeepSpeed: --deepspeed none --ddp_comm_hook onebit_adam."
            yield error(
                "DS302",
                "optimizer.type",
                f"optimizer.type is {name}, which DeepSpeed 0.19.7 removed (deepspeedai/DeepSpeed#8489). Use "
                f"{REMOVED[name.lower()]}, or DeepSpeed 0.19.6.{ours if name.lower() == 'onebitadam' else ''}",
            )
        elif config.stage > 1:
            yield error(
                "DS302",
                "optimizer.type",
                f"optimizer.type is {name}, which works up to ZeRO-1, but zero_optimization.stage is {config.stage}.",
            )
    elif name not in OF_TORCH:
        near = {"onebit": "AdamW", "fusedadam": "AdamW", "deepspeedcpuadam": "AdamW", "sgd": "SGD"}
        mend = near.get(name.lower(), "AdamW")
        yield error(
            "DS301",
            "optimizer.type",
            f"optimizer.type is {name}, which is neither an optimizer of DeepSpeed nor a class of torch.optim. Use "
            f"{mend}"
            + (": DeepSpeed takes the fast form by itself." if mend == "AdamW" and name.lower() in near else "."),
        )


def optimizer_is_tested_with_zero(config: Config, run: Context) -> Iterator[Finding]:
    """DS303. DeepSpeed refuses others under ZeRO, unless it is told that you know (runtime/engine.py)."""
    name = _name(config)
    allowed = config.is_on("zero_allow_untested_optimizer")
    if name is None or not config.stage or allowed or name in TESTED_WITH_ZERO or name.lower() in TESTED_WITH_ZERO:
        return
    if name.lower() not in REMOVED:
        yield error(
            "DS303",
            "optimizer.type",
            f"optimizer.type is {name}, which DeepSpeed has not tested with ZeRO, and refuses. Add "
            '"zero_allow_untested_optimizer": true, or use AdamW.',
            Put(at("zero_allow_untested_optimizer"), True),
        )


def offload_has_its_optimizer(config: Config, run: Context) -> Iterator[Finding]:
    """DS304. Offloaded states are updated on the CPU, by an optimizer that is made for it."""
    if config.offload("offload_optimizer") not in ("cpu", "nvme") or not config.stage:
        return
    name, forced = _name(config), config.get("zero_force_ds_cpu_optimizer") is not False
    if config.is_on("optimizer.params.torch_adam"):
        yield warning(
            "DS304",
            "optimizer.params.torch_adam",
            "optimizer.params.torch_adam is true with an offloaded optimizer: torch's AdamW then updates the states "
            "on the CPU, several times slower than DeepSpeed's own. Delete it.",
            Drop(at("optimizer.params.torch_adam")),
        )
    elif name is not None and name.lower() not in ON_CPU:
        yield warning(
            "DS304",
            "optimizer.type",
            f"optimizer.type is {name}, for which DeepSpeed has no CPU update, and the optimizer is offloaded. Use "
            "AdamW.",
        )
    if name is None and run.engine == "deepspeed" and forced:
        yield warning(
            "DS304",
            "zero_optimization.offload_optimizer",
            "the optimizer is offloaded and the file has no optimizer section: DeepSpeed refuses an optimizer of "
            "the script's own, unless it is DeepSpeedCPUAdam or DeepSpeedCPULion. Add a section, or build one of "
            "these.",
        )
    asked = str(run.arguments.get("optim") or "adamw")
    left = name is None or _left(config, run, "optimizer")
    if left and run.has_trainer and forced and not asked.startswith("adamw"):
        yield error(
            "DS304",
            "zero_optimization.offload_optimizer",
            f"the run asks for --optim {asked}, but the optimizer is offloaded, and DeepSpeed then takes its own CPU "
            "Adam alone. Drop --optim, or choose a config without offload.",
        )


def section_matches_the_flag(config: Config, run: Context) -> Iterator[Finding]:
    """DS305. An optimizer section wins over --optim without a word."""
    asked = run.arguments.get("optim")
    name = _name(config)
    if name is None or asked is None or _left(config, run, "optimizer"):
        return
    if name.lower() not in OWN and name not in OF_TORCH:
        return  # DS301 and DS302 say more
    if not str(asked).lower().startswith(name.lower()):
        yield error(
            "DS305",
            "optimizer.type",
            f"optimizer.type is {name}, but the run asks for --optim {asked}, which would be ignored. Delete the "
            "section, and the Trainer builds what the flag says.",
            Drop(at("optimizer")),
        )


def clipping_is_not_in_the_optimizer(config: Config, run: Context) -> Iterator[Finding]:
    """DS306. DeepSpeed refuses it there when the optimizer is built (runtime/engine.py)."""
    if config.has("optimizer.params.max_grad_norm"):
        yield error(
            "DS306",
            "optimizer.params.max_grad_norm",
            'optimizer.params.max_grad_norm is not taken by DeepSpeed. Use the key "gradient_clipping" at the top '
            "level.",
            Drop(at("optimizer.params.max_grad_norm")),
        )


def schedule_is_the_one_asked_for(config: Config, run: Context) -> Iterator[Finding]:
    """DS307. A scheduler section wins over --lr_scheduler_type without a word."""
    found = config.get("scheduler.type")
    asked = run.arguments.get("lr_scheduler_type")
    if not isinstance(found, str) or asked is None or _left(config, run, "scheduler"):
        return
    if found != SCHEDULES.get(str(asked)):
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
    if kind not in known and kind not in SCHEDULES_OF_TORCH:
        near = difflib.get_close_matches(kind, known, 1, 0.5)
        yield error(
            "DS311",
            "scheduler.type",
            f"scheduler.type is {kind}, which is neither a schedule of DeepSpeed ({', '.join(known)}) nor a class of "
            f"torch.optim.lr_scheduler.{f' Did you mean {near[0]}?' if near else ''}",
        )
    for name in config.section("scheduler.params"):
        if kind in known and name not in known[kind]:
            near = difflib.get_close_matches(name, known[kind], 1)
            yield error(
                "DS311",
                f"scheduler.params.{name}",
                f"scheduler.params.{name} is no parameter of {kind}, which takes {', '.join(known[kind])}."
                f"{f' Did you mean {near[0]}?' if near else ''}",
            )


def adam_takes_its_parameters(config: Config, run: Context) -> Iterator[Finding]:
    """DS311. DeepSpeed hands them on to whichever Adam it takes, whose constructor ends the run over another."""
    kind = _name(config)
    if (kind or "").lower() not in ("adam", "adamw"):
        return
    for name in config.section("optimizer.params"):
        if name not in (*OF_EVERY_ADAM, *OF_SOME_ADAM, "max_grad_norm"):  # DS306 speaks of the last
            near = difflib.get_close_matches(name, OF_EVERY_ADAM, 1)
            yield error(
                "DS311",
                f"optimizer.params.{name}",
                f"optimizer.params.{name} is no parameter of {kind}, which takes {', '.join(OF_EVERY_ADAM)}. "
                f"{f'Did you mean {near[0]}?' if near else 'Delete it.'}",
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


def _name(config: Config) -> str | None:
    found = config.get("optimizer.type")
    return found if isinstance(found, str) and found != "auto" else None


RULES = (
    optimizer_is_there,
    optimizer_is_tested_with_zero,
    offload_has_its_optimizer,
    section_matches_the_flag,
    clipping_is_not_in_the_optimizer,
    schedule_is_the_one_asked_for,
    schedule_has_its_optimizer,
    schedule_takes_its_parameters,
    adam_takes_its_parameters,
    warmup_fits_the_run,
    schedule_knows_its_end,
)
