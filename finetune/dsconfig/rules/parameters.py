"""DS311 and 312: the parameters of the optimizer, checked against the class that gets them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding, error
from finetune.dsconfig.rules.optimizer import is_left, of_torch
from finetune.dsconfig.shape import schema

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
            near = difflib.get_close_matches(name, defaults, 1)
            mend = f"Did you mean {near[0]}?" if near else "Delete it."
            said = f"{place} is not a parameter of {called}, which takes {', '.join(defaults)}. {mend}"
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


RULES = (optimizer_takes_its_parameters,)
