"""Mistakes in --optim, --optim_args and --dtype. The Trainer silently ignores --optim_args that its optimizer does not
know."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from finetune.run.engine import deepspeed_by_accelerate, fsdp_by_accelerate
from finetune.run.flag import FALSE, NUMBER, TRUE
from finetune.run.flags.adapter import PURE
from finetune.run.snapshot import snapshot

if TYPE_CHECKING:
    from finetune.run.run import Run

# transformers 5.23, trainer_optimizer.py. For the first two, any word but true, 1 and yes means off; for TURNED_ON, any
# word means on.
SWITCHES = {
    **dict.fromkeys(("nesterov", "centered"), ("true", "1", "yes", "false", "0", "no")),
    **dict.fromkeys(("use_kahan_summation", "bf16_stochastic_round"), (*TRUE, *FALSE)),
}
TURNED_ON = ("decouple_lr", "kahan_sum")
WORDS = ("proj", "proj_type", "scale_type")
# These accumulate what a 16-bit weight loses in each step and add it later (Kahan summation; torch-optimi,
# optimi/stableadamw.py: automatic for weights in bf16).
KEEPS_ROUNDED = ("stable_adamw",)
TAKES_ANY = "rmsprop_bnb"  # and its variants: all arguments are passed on to bitsandbytes


@cache
def without_args() -> tuple[str, ...]:
    """Optimizers for which --optim_args does nothing."""
    optim = next(row for row in snapshot()["flags"] if row["name"] == "optim")
    known = snapshot()["optim_args"]
    return tuple(name for name in optim["choices"] if not known.get(name) and not name.startswith(TAKES_ANY))


def optim_mistakes(run: Run) -> Iterator[str]:
    """Mistakes in --optim_args for an optimizer that takes some; the table in void.py covers the others."""
    text, optim = run.value("optim_args"), run.value("optim")
    known = snapshot()["optim_args"].get(optim)
    if not text or not known:
        return
    pairs = [pair.partition("=") for pair in str(text).replace(" ", "").split(",")]
    for name, equals, value in pairs:
        if not name:
            yield f"{run.said('optim_args')}: there is one comma too many. Write name=value, separated by commas."
        elif name not in known:
            takes = ", ".join(known)
            yield f"{run.said('optim_args')}, with {name}, but {run.said('optim')}, which takes only {takes}."
        elif not equals or not value:
            yield f"{run.said('optim_args')}: {name} has no value. Write name=value, separated by commas."
        elif wrong := _wrong(name, value):
            yield f"{run.said('optim_args')}: {name} is {value!r}, {wrong}."


def trains_half(run: Run) -> bool:
    """Whether the trained weights are kept in 16 bits, provided that `dtype_mistakes` finds nothing."""
    asked = str(run.value("dtype")) in ("bfloat16", PURE)
    return bool(asked and run.value("do_train") and not run.value("use_peft"))


def dtype_mistakes(run: Run) -> Iterator[str]:
    """Mistakes in --dtype: 16-bit weights lose most of an optimizer's steps to rounding, unless the optimizer keeps the
    rounding error; and the engine must support such weights."""
    dtype, said = str(run.value("dtype")), run.said("dtype")
    if dtype in ("None", "auto", "float32") or not run.value("do_train"):
        return
    if run.value("use_peft"):
        if dtype == PURE:
            yield f"{said}: the weights under an adapter are not trained. Give --dtype bfloat16."
    elif dtype == "float16":
        yield f"{said}: its range is too small for trained weights. Give bfloat16, or only --fp16 True."
    elif not run.value("model_name_or_path"):
        yield f"{said}, but a model from scratch is trained in fp32. Give --model_name_or_path, or drop it."
    elif deepspeed_by_accelerate(run) or any(
        (run.value(name) or "none") != "none" for name in ("deepspeed", "deepspeed_config")
    ):
        yield (
            f"{said}, but DeepSpeed keeps fp32 masters beside weights in bf16. Drop one of them; its config has "
            "bf16.bf16_master_weights_and_grads and bf16_optimizer_states for masters that round."
        )
    elif run.value("fsdp") or fsdp_by_accelerate(run):
        yield f"{said}, but accelerate's FSDP trains weights in fp32. Drop one of them."
    elif dtype != PURE and run.value("optim") not in KEEPS_ROUNDED:
        yield (
            f"{said}, but {run.said('optim')}: most of its steps would round away in 16 bits. Use --optim "
            f"{KEEPS_ROUNDED[0]}, which keeps the rounding error; or only --bf16 True, which keeps fp32 weights; or "
            f"--use_peft True; or --dtype {PURE}, which accepts the loss."
        )


def _wrong(name: str, value: str) -> str:
    if name in SWITCHES:
        return "" if value.lower() in SWITCHES[name] else "but must be True or False"
    if name in TURNED_ON:
        return "" if value.lower() in TRUE else "but transformers reads any word as True. Drop it, or write True"
    if name in WORDS or name.endswith("_dtype") or NUMBER.fullmatch(value):
        return ""
    return "but must be a number"


def missing_package(run: Run) -> Iterator[str]:
    """A missing package that the optimizer needs; otherwise the run would fail after loading the model."""
    name = str(run.value("optim"))
    if name in KEEPS_ROUNDED and importlib.util.find_spec("optimi") is None:
        yield f"{run.said('optim')}: needs torch-optimi, which is not installed. pip install torch-optimi."
    package = "torchao" if name.startswith("adamw_torch_") and name.endswith("bit") else None
    if package is None and ("8bit" in name or "bnb" in name or name.startswith("paged_")):
        package = "bitsandbytes"
    if package and importlib.util.find_spec(package) is None:
        yield f"{run.said('optim')}: needs {package}, which is not installed. pip install {package}."
