"""What is wrong with a run that its flags alone show, before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.errors import RequestError
from finetune.run.conflicts import FILES, conflicts, missing
from finetune.run.engine import deepspeed_by_accelerate, fsdp_by_accelerate
from finetune.run.facts import check_scratch
from finetune.run.flags.compression import OF_DDP, check_comm_hook
from finetune.run.flags.guards import guard_faults
from finetune.run.flags.language import OF_CHATS
from finetune.run.flags.pipeline import pipeline_faults
from finetune.run.flags.profiling import check_profile
from finetune.run.flags.trackers import check_trackers
from finetune.run.launch import COUNT
from finetune.run.output_folder import missing_checkpoint
from finetune.run.parse import COMMAND_LINE
from finetune.run.paths import missing_inputs
from finetune.run.void import is_overruled, says

if TYPE_CHECKING:
    from finetune.run.run import Run


FLAG = re.compile(r"--(\w+)")
COLUMNS = (
    *("text_column_name", "text_column_names", "tokens_column_name"),
    *("label_column_name", "label_column_names", "tags_column_name"),
)


def raised_by(*checks: Callable[[], object]) -> Iterator[str]:
    """What each says is wrong."""
    for one in checks:
        try:
            one()
        except RequestError as error:
            yield str(error)


def others(found: Iterable[str], mistakes: Sequence[str]) -> list[str]:
    """Those that speak of no flag of which one of the `mistakes` speaks: what was mistyped may be what they miss."""
    named = set(FLAG.findall("\n".join(mistakes)))
    return [one for one in dict.fromkeys(found) if not named.intersection(FLAG.findall(one))]


def within_range(run: Run) -> tuple[Run, list[str]]:
    """The run without numbers that cannot be meant, on which other checks count, and what is wrong with them."""
    wrong = dict(_out_of_range(run))
    settings = {name: one for name, one in run.settings.items() if name not in wrong}
    return replace(run, settings=settings), list(wrong.values())


def _out_of_range(run: Run) -> Iterator[tuple[str, str]]:
    for flag in run.recipe.flags.values():
        value = run.value(flag.name)
        if flag.range is not None and value is not None and not flag.range.holds(value):
            finite = " and finite" if isinstance(value, float) and math.isinf(value) else ""
            yield flag.name, f"{run.said(flag.name)}, but it must be {flag.range}{finite}."


def found_wrong(run: Run, is_here: bool) -> Iterator[str]:
    """Flags that contradict each other, what the engine or the launch cannot do, and, of a run that is to be here, what
    it needs and nobody gave."""
    yield from conflicts(run)
    if is_here:
        yield from missing(run)
        yield from missing_checkpoint(run)
        yield from raised_by(lambda: _check_optimizer(run), lambda: check_scratch(run))
    if run.stages is not None:
        yield from pipeline_faults(run)
    yield from guard_faults(run)


def found_wrong_here(run: Run, deepspeed: str | None) -> Iterator[str]:
    """Likewise of a run that is to start on this machine, by the DeepSpeed config of that name, if any."""
    yield from missing_inputs(run)
    yield from _of_deepspeed(run, deepspeed)
    yield from _of_ddp(run, deepspeed)
    yield from _of_meeting(run)
    yield from _of_builtin_data(run)
    asked = {name: run.given.get(name) is True for name in ("bf16", "fp16")}
    yield from raised_by(
        lambda: check_trackers(_listed(run.value("report_to")), source=run.source("report_to")),
        lambda: check_profile(run, deepspeed, None),
        lambda: check_comm_hook(run, deepspeed, asked),
    )


def _of_deepspeed(run: Run, deepspeed: str | None) -> Iterator[str]:
    if wrong := [code for code in run.value("disable_check") or () if not re.fullmatch(r"DS\d{3}", code)]:
        yield f"{run.said('disable_check')}, but {wrong[0]} is no code, like DS902. docs/check.md lists them."
    for name in ("disable_check", "nvme_path") if not (deepspeed or deepspeed_by_accelerate(run)) else ():
        if run.given.get(name) and run.source(name) == COMMAND_LINE:
            yield f"{run.said(name)}, which does nothing: this run is without DeepSpeed. Add --deepspeed, or drop it."


def _of_builtin_data(run: Run) -> Iterator[str]:
    if "train_file" in run.recipe.flags and not any(run.value(name) for name in ("dataset_name", *FILES)):
        for name in (name for name in COLUMNS if run.given.get(name)):
            yield f"{run.said(name)}, which does nothing: built-in data has columns of its own. Give --train_file."
        for name in (name for name in OF_CHATS if run.value(name) != run.recipe.default(name)):
            yield f"{run.said(name)}, which does nothing: built-in data has no conversations. Give --train_file."


def _of_ddp(run: Run, deepspeed: str | None) -> Iterator[str]:
    """A YAML may serve several launches, so that the engine which the command line asks for overrules its lines."""
    by_deepspeed = bool(deepspeed) or deepspeed_by_accelerate(run)
    if run.stages is not None or not (by_deepspeed or run.value("fsdp") or fsdp_by_accelerate(run)):
        return  # a pipeline refuses them in words of its own
    engines = ("deepspeed", "deepspeed_config") if by_deepspeed else ("fsdp",)
    by = next((name for name in engines if says(run.value(name))), None)
    engine = run.said(by) if by else "accelerate launch asks for " + ("DeepSpeed" if by_deepspeed else "FSDP")
    place = run.source(by) if by in (*run.given, "fsdp") else COMMAND_LINE  # that of the launcher
    for name in (*OF_DDP, *("ddp_backend",) * by_deepspeed):
        if says(run.given.get(name)) and not is_overruled(run.source(name), place):
            yield f"{run.said(name)}, which is for DistributedDataParallel, but {engine}. Drop one of the two."


def _of_meeting(run: Run) -> Iterator[str]:
    if "RANK" not in os.environ or run.launch.world_size == 1:
        return
    lacking = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if lacking:
        yield (
            f"RANK is {run.launch.rank} and WORLD_SIZE is {run.launch.world_size} in the environment, without "
            f"{' and '.join(lacking)}, where the ranks meet. Set what is missing, launch with `torchrun "
            "--nproc_per_node N`, or unset RANK and WORLD_SIZE for a run of one process."
        )
    port = os.environ.get("MASTER_PORT") or "1"
    if not (COUNT.fullmatch(port) and 0 < int(port) < 2**16):
        yield f"MASTER_PORT is {port!r} in the environment, but a port is a whole number from 1 to 65535."


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
