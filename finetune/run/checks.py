"""What is wrong with a run that its flags alone show, before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from finetune.errors import RequestError
from finetune.run.conflicts import conflicts, missing
from finetune.run.flags.compression import check_comm_hook
from finetune.run.flags.guards import check_guards
from finetune.run.flags.pipeline import check_pipeline
from finetune.run.flags.profiling import check_profile
from finetune.run.flags.trackers import check_trackers
from finetune.run.output_folder import missing_checkpoint

if TYPE_CHECKING:
    from finetune.run.run import Run


def check(run: Run, is_here: bool = True, mistakes: Sequence[str] = ()) -> None:
    """Raises RequestError, with the `mistakes` that were found before, for values that cannot be meant, for flags that
    contradict each other, for what the engine or the launch cannot do, and, of a run that is to be here, for what it
    needs and nobody gave."""
    out_of_range = list(_out_of_range(run))
    found = [*mistakes, *out_of_range, *(() if out_of_range else conflicts(run))]  # which count on these numbers
    if is_here:
        found += [*missing(run), *missing_checkpoint(run)]
    if found:
        raise RequestError("\n".join(found))
    if is_here:
        _check_optimizer(run)
    if run.stages is not None:
        check_pipeline(run)
    check_guards(run)


def _out_of_range(run: Run) -> Iterator[str]:
    for flag in run.recipe.flags.values():
        value = run.value(flag.name)
        if flag.range is not None and value is not None and not flag.range.holds(value):
            finite = " and finite" if isinstance(value, float) and math.isinf(value) else ""
            yield f"{run.said(flag.name)}, but it must be {flag.range}{finite}."


def check_here(run: Run, deepspeed: str | None) -> None:
    """Likewise for a run that is to start on this machine, by the DeepSpeed config of that name, if any."""
    check_trackers(_listed(run.value("report_to")))
    check_profile(run, deepspeed, None)
    check_comm_hook(run, deepspeed, {name: run.given.get(name) is True for name in ("bf16", "fp16")})


def _check_optimizer(run: Run) -> None:
    """An optimizer of a package that is missing would end the run once the model is loaded."""
    name = str(run.value("optim"))
    package = "torchao" if name.startswith("adamw_torch_") and name.endswith("bit") else None
    if package is None and ("8bit" in name or "bnb" in name or name.startswith("paged_")):
        package = "bitsandbytes"
    if package and importlib.util.find_spec(package) is None:
        raise RequestError(f"{run.said('optim')}: needs {package}, which is not installed. pip install {package}.")


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]
