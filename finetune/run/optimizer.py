"""What is wrong with --optim and --optim_args, of which the Trainer takes what its optimizer knows, and passes the rest
over."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from finetune.run.flag import FALSE, NUMBER, TRUE
from finetune.run.snapshot import snapshot

if TYPE_CHECKING:
    from finetune.run.run import Run

# transformers 5.23, trainer_optimizer.py. Of the first two any word but true, 1 and yes is off; TURNED_ON are on for
# any word.
SWITCHES = {
    **dict.fromkeys(("nesterov", "centered"), ("true", "1", "yes", "false", "0", "no")),
    **dict.fromkeys(("use_kahan_summation", "bf16_stochastic_round"), (*TRUE, *FALSE)),
}
TURNED_ON = ("decouple_lr", "kahan_sum")
WORDS = ("proj", "proj_type", "scale_type")
TAKES_ANY = "rmsprop_bnb"  # and its like: all are handed on to bitsandbytes


@cache
def without_args() -> tuple[str, ...]:
    """Optimizers for which --optim_args does nothing."""
    optim = next(row for row in snapshot()["flags"] if row["name"] == "optim")
    known = snapshot()["optim_args"]
    return tuple(name for name in optim["choices"] if not known.get(name) and not name.startswith(TAKES_ANY))


def optim_mistakes(run: Run) -> Iterator[str]:
    """In --optim_args, of an optimizer that takes some; the table in void.py has the others."""
    text, optim = run.value("optim_args"), run.value("optim")
    known = snapshot()["optim_args"].get(optim)
    if not text or not known:
        return
    pairs = [pair.partition("=") for pair in str(text).replace(" ", "").split(",")]
    for name, equals, value in pairs:
        if not name:
            yield f"{run.said('optim_args')}: there is a comma too many. Write name=value, with commas between."
        elif name not in known:
            takes = ", ".join(known)
            yield f"{run.said('optim_args')}, with {name}, but {run.said('optim')}, which takes {takes} alone."
        elif not equals or not value:
            yield f"{run.said('optim_args')}: {name} has no value. Write name=value, with commas between."
        elif wrong := _wrong(name, value):
            yield f"{run.said('optim_args')}: {name} is {value!r}, {wrong}."


def _wrong(name: str, value: str) -> str:
    if name in SWITCHES:
        return "" if value.lower() in SWITCHES[name] else "and must be True or False"
    if name in TURNED_ON:
        return "" if value.lower() in TRUE else "but transformers takes any word for True. Drop it, or write True"
    if name in WORDS or name.endswith("_dtype") or NUMBER.fullmatch(value):
        return ""
    return "and must be a number"


def missing_package(run: Run) -> Iterator[str]:
    """That an optimizer needs, which would end the run once the model is loaded."""
    name = str(run.value("optim"))
    package = "torchao" if name.startswith("adamw_torch_") and name.endswith("bit") else None
    if package is None and ("8bit" in name or "bnb" in name or name.startswith("paged_")):
        package = "bitsandbytes"
    if package and importlib.util.find_spec(package) is None:
        yield f"{run.said('optim')}: needs {package}, which is not installed. pip install {package}."
