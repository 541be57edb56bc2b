"""The profiling flags, and which of them work together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import RequestError
from finetune.run.files import STATE_FILE
from finetune.run.flag import Range, flag
from finetune.run.on_resume import GOES_ON
from finetune.run.trackers import check_trackers
from finetune.safe_read import read_json_object

if TYPE_CHECKING:
    from finetune.run.run import Run

MOST_STEPS = 50  # a trace lists every operator: more steps are hundreds of megabytes, which no viewer opens
MONITORS = {"csv": "csv_monitor", "tensorboard": "tensorboard", "wandb": "wandb"}  # -> section of the config
OF_DEEPSPEED = ("flops_profiler", "comms_logger", "ds_monitor")


@dataclass
class ProfileArguments:
    """Where a step's time goes; docs/profiling.md explains a report."""

    profile: int = flag(
        0, "trace this many steps, and report where their time goes", GOES_ON, range=Range(least=0, most=MOST_STEPS)
    )
    profile_first_step: int = flag(
        6, "first step to profile, counted from the start or from the resumed checkpoint", GOES_ON, range=Range(least=2)
    )
    flops_profiler: bool = flag(
        False, "DeepSpeed's FLOPs profiler: FLOPs and time by module, for one step, in flops.txt", GOES_ON
    )
    comms_logger: bool = flag(
        False, "DeepSpeed's communication logger: count, size and time of each collective, in comms.txt", GOES_ON
    )
    ds_monitor: str | None = flag(
        None, "DeepSpeed's monitor: csv, tensorboard or wandb, in the folder monitor/", GOES_ON, choices=tuple(MONITORS)
    )


def check_profile(run: Run, config: str | None, checkpoint: str | None) -> None:
    """Raises RequestError for a profile that cannot be made. `config` names the run's DeepSpeed config."""
    steps, first = run.value("profile") or 0, run.value("profile_first_step")
    asked = [name for name in OF_DEEPSPEED if run.value(name)]
    if not steps and not asked:
        return
    first_asked = "profile" if steps else asked[0]
    if not run.value("do_train"):
        raise RequestError(f"{run.said(first_asked)}, which profiles training, but {run.said('do_train')}. Drop it.")
    if steps and {"flops_profiler", "comms_logger"} & set(asked):
        name = "flops_profiler" if "flops_profiler" in asked else "comms_logger"
        raise RequestError(
            f"{run.said('profile')}, and {run.said(name)}: DeepSpeed's profilers wait after every module and every "
            "collective, so the trace would not show your real steps. Run once with each."
        )
    _check_deepspeed(run, asked, config)
    if (steps or "flops_profiler" in asked) and run.value("max_steps") > 0:
        check_length(first, max(steps, 1), run.value("max_steps"), done=steps_done(checkpoint))


def check_length(first: int, steps: int, last: int, done: int) -> None:
    """Raises RequestError if a run of `last` steps, with `done` of them before the resume, ends too early."""
    if done + first + steps - 1 <= last:
        return
    of = f"; {done} of them were done before it was resumed" if done else ""
    least = done + first + steps - 1
    room = last - done
    mends = ["more steps by --max_steps or --num_train_epochs"]
    if room >= first:
        mends.append(f"a --profile of at most {room - first + 1}")
    if room > steps:
        mends.append(f"a --profile_first_step from 2 to {room - steps + 1}")
    elif room > 1:
        mends.append(f"--profile {room - 1} with --profile_first_step 2")
    raise RequestError(
        f"--profile: {steps} step(s) from --profile_first_step {first} end with step {least}, but this run ends "
        f"with step {last}{of}. Give {', or '.join(mends)}."
    )


def steps_done(checkpoint: str | None) -> int:
    """The optimizer steps of a checkpoint; 0 without one."""
    if checkpoint is None:
        return 0
    return int(read_json_object(Path(checkpoint) / STATE_FILE)["global_step"])


def _check_deepspeed(run: Run, asked: list[str], config: str | None) -> None:
    if not asked:
        return
    if config is None:
        raise RequestError(
            f"{run.said(asked[0])}, but this run has no DeepSpeed config. Add --deepspeed zero0 (or another stage) "
            "under torchrun or the deepspeed launcher, or use --profile."
        )
    if run.stages is not None and "flops_profiler" in asked:
        raise RequestError(
            f"{run.said('flops_profiler')}: DeepSpeed's pipeline never prints its counts. Use --profile, or "
            f"{run.without_pipeline}."
        )
    monitor = run.value("ds_monitor")
    if monitor is None:
        return
    if run.stages is not None:
        raise RequestError(
            f"{run.said('ds_monitor')}: DeepSpeed's monitors fail in a pipeline's evaluation (DS806). Use --report_to."
        )
    check_trackers([monitor], "ds_monitor", run.source("ds_monitor"))
    if monitor in str(run.value("report_to")):
        raise RequestError(
            f"{run.said('ds_monitor')}, and {run.said('report_to')}: they log the same run twice. Keep one; the latter "
            "logs more."
        )
