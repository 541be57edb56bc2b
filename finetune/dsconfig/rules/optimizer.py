"""DS301 to 306: the optimizer. DS311 and 312: its parameters, checked against the class that gets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, warning
from finetune.dsconfig.shape import schema
from finetune.errors import or_meant

# deepspeed 0.19.8, runtime/config.py, DEEPSPEED_OPTIMIZERS; any other name must be a class of torch.optim.
OWN = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
# runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS, under the names that configs use.
TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon", "Adam", "AdamW", "Adagrad")
# With an update on the CPU (runtime/engine.py, _configure_basic_optimizer).
ON_CPU = ("adam", "adamw", "adagrad", "lion")
REMOVED = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
REMOVED_IN = (0, 19, 7)


def is_left_to_the_trainer(section: dict[str, Any]) -> bool:
    """True for an optimizer or scheduler section that sets no number: every value is "auto" or only a switch."""
    known = section.get("type") in ("AdamW", "WarmupLR", "WarmupDecayLR")
    switches = ("torch_adam", "warmup_type", "adam_w_mode")
    params = section.get("params", {})
    return known and isinstance(params, dict) and all(v == "auto" for k, v in params.items() if k not in switches)


def _is_there(name: str, run: Context) -> bool:
    """Whether this DeepSpeed has the optimizer; if not, DS301 or DS302 says all there is to say of it."""
    return name.lower() in OWN or name in of_torch() or (name.lower() in REMOVED and not _is_removed(run))


def _is_removed(run: Context) -> bool:
    return (run.version("deepspeed") or REMOVED_IN) >= REMOVED_IN


def of_torch() -> dict[str, Any]:
    """The classes of torch.optim, with their parameters."""
    return dict(schema()["properties"]["optimizer"]["x-params"])


def is_left(config: Config, run: Context, name: str) -> bool:
    """True if one of our recipes drops the section; any other Trainer keeps it."""
    return run.engine == "recipe" and is_left_to_the_trainer(config.section(name))


def optimizer_is_there(config: Config, run: Context) -> Iterator[Finding]:
    """DS301: an optimizer that this DeepSpeed does not have; DS302: one that it has removed."""
    name = _name(config)
    if name is None and config.section("optimizer").get("params") and not config.has("optimizer.type"):
        yield error(
            "DS301", "optimizer", "optimizer has params but no type: DeepSpeed ignores them. Add a type, or delete it."
        )
    if name is None or name.lower() in OWN:
        return
    if name.lower() in REMOVED:
        if _is_removed(run):
            ours = " The recipes have it without DeepSpeed: --deepspeed none --ddp_comm_hook onebit_adam."
            said = (
                f"optimizer.type is {name}, which DeepSpeed 0.19.7 removed (deepspeedai/DeepSpeed#8489). Use "
                f"{REMOVED[name.lower()]}, or DeepSpeed 0.19.6.{ours if name.lower() == 'onebitadam' else ''}"
            )
            yield error("DS302", "optimizer.type", said)
        elif config.stage > 1:
            said = f"optimizer.type is {name}, which works up to ZeRO-1, but zero_optimization.stage is {config.stage}."
            yield error("DS302", "optimizer.type", said)
    elif name not in of_torch():
        near = {"onebit": "AdamW", "fusedadam": "AdamW", "deepspeedcpuadam": "AdamW", "sgd": "SGD"}
        mend = near.get(name.lower(), "AdamW")
        said = (
            f"optimizer.type is {name}, which is neither an optimizer of DeepSpeed nor a class of torch.optim. Use "
            f"{mend}"
            + (": DeepSpeed picks the fast version by itself." if mend == "AdamW" and name.lower() in near else ".")
        )
        yield error("DS301", "optimizer.type", said)


def optimizer_is_tested_with_zero(config: Config, run: Context) -> Iterator[Finding]:
    """DS303. DeepSpeed refuses other optimizers under ZeRO, unless the config allows them (runtime/engine.py)."""
    name = _name(config)
    allowed = config.is_on("zero_allow_untested_optimizer")
    if name is None or not config.stage or allowed or name in TESTED_WITH_ZERO or name.lower() in TESTED_WITH_ZERO:
        return
    if _is_there(name, run):
        said = (
            f"optimizer.type is {name}, which DeepSpeed has not tested with ZeRO, and refuses. Add "
            '"zero_allow_untested_optimizer": true, or use AdamW.'
        )
        yield error("DS303", "optimizer.type", said, Put(at("zero_allow_untested_optimizer"), True))


def offload_has_its_optimizer(config: Config, run: Context) -> Iterator[Finding]:
    """DS304. Offloaded states are updated on the CPU, by an optimizer made for it."""
    if config.offload("offload_optimizer") not in ("cpu", "nvme") or not config.stage:
        return
    name, forced = _name(config), config.get("zero_force_ds_cpu_optimizer") is not False
    if config.is_on("optimizer.params.torch_adam"):
        said = (
            "optimizer.params.torch_adam is true with an offloaded optimizer: torch's AdamW then updates the states "
            "on the CPU, several times slower than DeepSpeed's own. Delete it."
        )
        yield warning("DS304", "optimizer.params.torch_adam", said, Drop(at("optimizer.params.torch_adam")))
    elif name is not None and name.lower() not in ON_CPU and _is_there(name, run):
        said = (
            f"optimizer.type is {name}, for which DeepSpeed has no CPU update, but the optimizer is offloaded. Use "
            "AdamW."
        )
        yield warning("DS304", "optimizer.type", said)
    if name is None and run.engine == "deepspeed" and forced:
        said = (
            "the optimizer is offloaded and the file has no optimizer section: DeepSpeed refuses an optimizer that "
            "the script builds, unless it is DeepSpeedCPUAdam or DeepSpeedCPULion. Add a section, or build one of "
            "these."
        )
        yield warning("DS304", "zero_optimization.offload_optimizer", said)
    asked = str(run.arguments.get("optim") or "adamw")
    left = name is None or is_left(config, run, "optimizer")
    if left and run.has_trainer and forced and not asked.startswith("adamw"):
        said = (
            f"the run asks for --optim {asked}, but the optimizer is offloaded, and DeepSpeed then uses only its own "
            "CPU Adam. Drop --optim, or choose a config without offload."
        )
        yield error("DS304", "zero_optimization.offload_optimizer", said)


def section_matches_the_flag(config: Config, run: Context) -> Iterator[Finding]:
    """DS305. An optimizer section silently overrides --optim."""
    asked = run.arguments.get("optim")
    name = _name(config)
    if name is None or asked is None or is_left(config, run, "optimizer"):
        return
    if not _is_there(name, run):
        return
    if not str(asked).lower().startswith(name.lower()):
        said = (
            f"optimizer.type is {name}, but the run asks for --optim {asked}, which would be ignored. Delete the "
            "section, and the Trainer uses the flag."
        )
        yield error("DS305", "optimizer.type", said, Drop(at("optimizer")))


def clipping_is_not_in_the_optimizer(config: Config, run: Context) -> Iterator[Finding]:
    """DS306. DeepSpeed refuses it there when the optimizer is built (runtime/engine.py)."""
    place = "optimizer.params.max_grad_norm"
    if config.has(place):
        here, there = config.get(place), config.get("gradient_clipping")
        says_one = there is None or there == here
        moves = (Put(at("gradient_clipping"), here), Drop(at(place))) if says_one and here is not None else ()
        said = f'{place} is not accepted by DeepSpeed. Use the key "gradient_clipping" at the top level' + (
            "." if says_one else f", which is {there}."
        )
        yield error("DS306", place, said, *moves)


def _name(config: Config) -> str | None:
    found = config.get("optimizer.type")
    return found if isinstance(found, str) and found != "auto" else None


# deepspeed 0.19.8, runtime/engine.py, _configure_basic_optimizer: the class without and with offload.
CLASSES = {
    "adam": ("FusedAdam", "DeepSpeedCPUAdam"),
    "adamw": ("FusedAdam", "DeepSpeedCPUAdam"),
    "adagrad": ("Adagrad", "DeepSpeedCPUAdagrad"),
    "lamb": ("FusedLamb", "FusedLamb"),
    "lion": ("FusedLion", "DeepSpeedCPULion"),
    "muon": ("Muon", "Muon"),
}
ADAMS = ("adam", "adamw", "muon")
TAKEN_OUT = (
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
)  # DeepSpeed removes these for ADAMS before it calls the class
SET = "adamw_mode"  # DeepSpeed sets it from adam_w_mode


def optimizer_takes_its_parameters(config: Config, run: Context) -> Iterator[Finding]:
    """DS311. DeepSpeed passes them on to the class, whose constructor raises for an unknown one; for Muon they are
    looked up by name, and others ignored. DS312: a list where a number is expected, or of another length."""
    kind = config.get("optimizer.type")
    built = _class_of(config, kind) if isinstance(kind, str) else None
    if built is None or is_left(config, run, "optimizer"):
        return
    own, defaults = built in schema()["properties"]["optimizer"]["x-own-params"], _defaults(config, kind, built)
    called = kind if kind == built else f"{kind} ({built})"
    for name, given in config.section("optimizer.params").items():
        place = f"optimizer.params.{name}"
        if name not in defaults:
            if name == "max_grad_norm":
                continue  # DS306
            mend = or_meant(name, defaults, " Delete it.")
            said = f"{place} is not a parameter of {called}, which takes {', '.join(defaults)}.{mend}"
            yield error("DS311", place, said)
        elif name == "amsgrad" and own and given is True:
            yield error("DS311", place, f"{place} is true, which {called} does not do. Delete it.")
        # An "auto" for eps becomes a number, --adam_epsilon.
        elif (wanted := _other_form(1e-8 if name == "eps" and given == "auto" else given, defaults[name])) is not None:
            yield error("DS312", place, f"{place} is {given}, but {called} takes {wanted} there.")


def _class_of(config: Config, kind: str) -> str | None:
    """The name of the class; None if it is unknown here, as for the package mup."""
    name = kind.lower()
    if name in ("adam", "adamw") and config.is_on("optimizer.params.torch_adam"):
        return "Adam" if name == "adam" and config.is_off("optimizer.params.adam_w_mode") else "AdamW"
    if name in CLASSES:
        return CLASSES[name][config.offload("offload_optimizer") != "none"]
    return kind if kind in of_torch() else None


def _defaults(config: Config, kind: str, built: str) -> dict[str, Any]:
    section = schema()["properties"]["optimizer"]
    taken = section["x-own-params"].get(built) or section["x-params"][built]
    taken = {name: default for name, default in taken.items() if name != SET}
    return taken | (dict.fromkeys(TAKEN_OUT) if kind.lower() in ADAMS else {})


def _other_form(given: Any, default: Any) -> str | None:
    """What the default shows to be expected, if a list is given for a number or the other way round."""
    if given == "auto" or default is None:
        return None
    if isinstance(default, list):
        fits = isinstance(given, list) and len(given) == len(default)
        return None if fits else f"a list of {len(default)} numbers"
    return "a number" if isinstance(given, list) else None
