"""DS4xx: fp16, bf16 and related settings."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, warning
from finetune.dsconfig.shape import schema

AMPERE = (8, 0)  # compute capability of the first GPUs with bf16 units
DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
MASTERS = ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")


def one_precision_is_on(config: Config, run: Context) -> Iterator[Finding]:
    """DS401. DeepSpeed asserts it in the engine."""
    if config.is_on("fp16.enabled") and (config.is_on("bf16.enabled") or config.is_on("bfloat16.enabled")):
        said = "fp16.enabled and bf16.enabled are both true, but DeepSpeed accepts only one. Keep bf16 on new GPUs."
        yield error("DS401", "fp16.enabled", said)


def bf16_has_its_own_name(config: Config, run: Context) -> Iterator[Finding]:
    """DS105. accelerate 1.15, utils/dataclasses.py, set_mixed_precision: it looks only for `bf16` and otherwise adds
    it, turned off unless a flag asks for it; DeepSpeed then uses that."""
    is_left = config.is_on("bfloat16.enabled") and not config.has("bf16") and not run.arguments.get("bf16")
    if is_left and run.engine != "deepspeed":
        is_off = run.arguments.get("bf16") is False
        said = (
            "bfloat16.enabled is true, but accelerate, and so the Trainer, reads only bf16, and adds one that is off"
            f"{'' if is_off else ' unless --bf16 or its mixed_precision asks for it'}: "
            "the run then trains in fp32. Rename bfloat16 to bf16."
        )
        yield (error if is_off else warning)("DS105", "bfloat16.enabled", said)


def fp16_has_a_gpu(config: Config, run: Context) -> Iterator[Finding]:
    """DS402."""
    if run.has_cuda is False and (config.is_on("fp16.enabled") or (run.has_trainer and run.arguments.get("fp16"))):
        said = "fp16 is on, but there is no GPU, and fp16 does not train on a CPU. Use --bf16 True, or neither."
        yield error("DS402", "fp16.enabled", said)


def bf16_has_its_gpu(config: Config, run: Context) -> Iterator[Finding]:
    """DS403. Older GPUs have no bf16 units: torch computes in fp32 there, slowly, or DeepSpeed refuses."""
    asked = (
        config.is_on("bf16.enabled")
        or config.is_on("bfloat16.enabled")
        or (config.is_auto("bf16.enabled") and run.arguments.get("bf16"))
    )
    if asked and run.gpu_capability is not None and run.gpu_capability < AMPERE:
        capability = ".".join(map(str, run.gpu_capability))
        said = (
            f"bf16.enabled is on, but this GPU has compute capability {capability}, but bf16 needs 8.0 (Ampere). "
            "Use fp16."
        )
        yield error("DS403", "bf16.enabled", said)


def loss_scale_does_something(config: Config, run: Context) -> Iterator[Finding]:
    """DS404. Fields of dynamic loss scaling are not read with a fixed scale, or with fp16 off."""
    fields = [name for name in DYNAMIC if config.has(f"fp16.{name}")]
    scale = config.number("fp16.loss_scale")
    if not config.has("fp16.enabled"):
        return  # DS408 says more
    if scale and fields and not config.is_off("fp16.enabled"):
        said = (
            f"fp16.loss_scale is {scale:g}, a fixed scale, so {', '.join(fields)} {_do(fields)} nothing. Set it to 0 "
            "for dynamic scaling, or delete them."
        )
        yield warning("DS404", f"fp16.{fields[0]}", said)
    elif (fields or scale) and config.is_off("fp16.enabled"):
        names = [*fields, *(["loss_scale"] if scale else [])]
        said = f"fp16.enabled is false, so {', '.join(names)} {_do(names)} nothing. " + (
            "Delete them." if run.engine == "deepspeed" else 'Write "auto", or delete them.'
        )
        yield warning("DS404", f"fp16.{names[0]}", said)


def loss_scale_can_move(config: Config, run: Context) -> Iterator[Finding]:
    """DS407. deepspeed 0.19.8, runtime/precision_config.py, refuses the first two if the scale is dynamic; with a
    hysteresis below 1 it never falls (runtime/fp16/loss_scaler.py, update_scale, counts down and waits for 1)."""
    asked = run.arguments.get("fp16") if config.is_auto("fp16.enabled") else config.is_on("fp16.enabled")
    may_be = asked is None and run.engine != "deepspeed"  # an "auto" whose flag is not known
    if config.number("fp16.loss_scale") or not (asked or may_be):
        return
    for name in ("loss_scale_window", "min_loss_scale", "hysteresis"):
        place, found = f"fp16.{name}", config.number(f"fp16.{name}")
        if found is not None and found < 1:
            does = "so the scale would never fall again" if name == "hysteresis" else "which DeepSpeed refuses"
            said = f"{place} is {found:g}, {does}. Write at least 1, or delete it: the default is"
            yield (error if asked else warning)("DS407", place, f"{said} {_default(place)}.")


def precision_is_on_or_off(config: Config, run: Context) -> Iterator[Finding]:
    """DS408. `enabled` is false by default, and accelerate does not add it to an existing section, whatever the flag
    says (accelerate 1.15, utils/dataclasses.py, set_mixed_precision)."""
    for name in ("fp16", "bf16"):
        if config.section(name) and not config.has(f"{name}.enabled"):
            auto = '"auto", to follow the flag' if run.engine != "deepspeed" else "true"
            said = f"{name} has no enabled, which is false by default: no {name}, with or without --{name}."
            yield error("DS408", name, f'{said} Add "enabled": {auto}; or delete the section.')


def masters_have_zero(config: Config, run: Context) -> Iterator[Finding]:
    """DS405. deepspeed 0.19.8, runtime/config.py, _do_error_check."""
    for place in MASTERS:
        if config.is_on(place) and not config.stage:
            said = f"{place} needs ZeRO stage 1 to 3, but stage is 0. Raise it, or delete the key."
            yield error("DS405", place, said, Drop(at(place)))
    if config.is_on(MASTERS[2]) and not config.is_on(MASTERS[1]):
        said = f"{MASTERS[2]} also needs bf16_master_weights_and_grads. Set it to true, or delete the key."
        yield error("DS405", MASTERS[2], said, Put(at(MASTERS[1]), True))


def autocast_is_alone(config: Config, run: Context) -> Iterator[Finding]:
    """DS406. torch.autocast keeps fp32 weights; the fp16 and bf16 sections replace them."""
    halves = [name for name in ("fp16", "bf16") if config.is_on(f"{name}.enabled")]
    if config.is_on("torch_autocast.enabled") and halves:
        said = (
            f"torch_autocast.enabled and {halves[0]}.enabled are both true: the weights are already {halves[0]}, so "
            "autocast saves nothing. Keep one."
        )
        yield warning("DS406", "torch_autocast.enabled", said)


def _default(place: str) -> object:
    section, name = place.split(".")
    return schema()["properties"][section]["properties"][name]["default"]


def _do(names: list[str]) -> str:
    return "do" if len(names) > 1 else "does"
