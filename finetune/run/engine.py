"""Which engine trains: DeepSpeed and with which config, FSDP, or neither. Flags, launcher and `accelerate` decide. Also
the context of a run that the rules for DeepSpeed configs get."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.dsconfig.check import read
from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.load import Loaded, find_config, load, on_disk
from finetune.dsconfig.parse import NotJsonError, parse
from finetune.errors import RequestError
from finetune.run.facts import check_sharded
from finetune.run.launch import accelerate_uses_deepspeed, accelerate_uses_fsdp
from finetune.run.run import Run

# The flags that the rules read, besides the optimizer and the schedule.
RULED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "learning_rate", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "weight_decay", "max_steps", "warmup_steps", "save_only_model"),
    *("load_best_model_at_end", "report_to", "bf16_full_eval", "fp16_full_eval"),
)
FLAGS = ("deepspeed", "deepspeed_config")  # each names a config
# The rules see these only if given: a section of the config may override their defaults.
ONLY_IF_GIVEN = ("optim", "lr_scheduler_type")
# deepspeed 0.19.8, autotuning/scheduler.py, run_experiment; its log repeats the line that contains "error". A trial
# ends with `exit()` inside a step, on each rank separately (runtime/engine.py, forward and _autotuning_exit).
TRIAL = (
    "--deepspeed_config is a config in base64, as `deepspeed --autotuning` gives to its trials. It cannot tune "
    "recipes: DeepSpeed ends the process inside a step. `finetune plan RUN.yaml --autotune 5` tries the best layouts "
    "of a run, and `finetune bench GRID.yaml` measures a grid. For a run, give the path of a JSON file."
)


def deepspeed_by_accelerate(run: Run) -> bool:
    """Whether `accelerate launch` has set up DeepSpeed for this run. The environment alone does not tell: if a flag
    asks for DeepSpeed, `start` sets the same variable for the libraries."""
    return run.launch.launcher == "accelerate" and accelerate_uses_deepspeed()


def fsdp_by_accelerate(run: Run) -> bool:
    return run.launch.launcher == "accelerate" and accelerate_uses_fsdp()


def settle_engine(run: Run) -> Run:
    """The run with the engine that its launch and flags choose, so that its record reproduces it. Raises
    RequestError."""
    faults, found = [], []
    for one in (fsdp_of, deepspeed_config_of):  # report the errors of both at once
        try:
            found.append(one(run))
        except RequestError as error:
            faults.append(str(error))
    if faults:
        raise RequestError("\n".join(faults))
    fsdp, asked = found
    run = run.settled(run.source("fsdp"), fsdp=fsdp)
    if not asked or deepspeed_by_accelerate(run):
        return run
    refuse_missing_config(run, asked)
    return run if run.value("deepspeed") == asked else run.settled("follows from the launch", deepspeed=asked)


def refuse_missing_config(run: Run, asked: str) -> None:
    """Raises RequestError unless a DeepSpeed config has this path, or ships under this name."""
    if _is_in_base64(asked):
        raise RequestError(TRIAL)
    flag = next((name for name in FLAGS if run.given.get(name) == asked), None)
    try:
        find_config(asked)
    except RequestError as error:
        said = f"{run.said(flag)}: " if flag else ""
        raise RequestError(f"{said}{error}") from error


def _is_in_base64(asked: str) -> bool:
    try:
        return isinstance(json.loads(base64.urlsafe_b64decode(asked)), dict)
    except ValueError:
        return False


def _asked_fsdp(run: Run) -> Any:
    asked = run.value("fsdp")
    is_switch = isinstance(asked, str) and asked.lower() in ("true", "false", "none", "")
    return asked.lower() == "true" or None if is_switch else asked


def fsdp_of(run: Run) -> Any:
    """The value of --fsdp: None, True, or the Trainer's older string form. Raises RequestError if it cannot work."""
    asked = _asked_fsdp(run)
    if asked and run.launch.world_size == 1:
        raise RequestError(
            f"{run.said('fsdp')}, which shards over several ranks, but this is one. Drop it, or launch with "
            "`torchrun --nproc_per_node N`."
        )
    if (asked or fsdp_by_accelerate(run)) and not run.value("do_train"):
        fsdp = run.said("fsdp") if asked else "accelerate launch asks for FSDP"
        raise RequestError(f"{fsdp}, which shards training, but {run.said('do_train')}. Drop one.")
    return asked


def deepspeed_config_of(run: Run) -> str | None:
    """The DeepSpeed config of the run, a shipped name or a path, or None for a run without DeepSpeed.

    --deepspeed or --deepspeed_config name a shipped config or a path; `none` turns it off. The deepspeed launcher
    defaults to zero2, plain python and torchrun to none. Under `accelerate launch`, its own config decides.
    """
    launch = run.launch
    flag = "deepspeed" if run.value("deepspeed") else "deepspeed_config"
    asked, said = run.value(flag), run.said(flag)
    by_accelerate = deepspeed_by_accelerate(run)
    if _asked_fsdp(run) or fsdp_by_accelerate(run):
        if by_accelerate or asked not in (None, "none"):
            fsdp = run.said("fsdp") if _asked_fsdp(run) else "accelerate launch asks for FSDP"
            other = "accelerate launch asks for DeepSpeed" if by_accelerate else said
            raise RequestError(f"{fsdp}, and {other}: both shard the model. Keep one.")
        return None
    if by_accelerate and asked:
        raise RequestError(
            f"{said}, but accelerate launch already sets up DeepSpeed. Drop --{flag}, or launch with `deepspeed` or "
            "`torchrun` instead."
        )
    if by_accelerate:
        asked = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if run.stages is not None:
        if by_accelerate:
            raise RequestError(
                "accelerate launch sets up DeepSpeed for the Trainer, but a pipeline has its own engine. Launch "
                "with `deepspeed` or `torchrun`, or with an accelerate config without DeepSpeed."
            )
        if asked == "none":
            raise RequestError(f"{said}, but a pipeline needs DeepSpeed. Drop it, or {run.without_pipeline}.")
        if not run.value("do_train"):
            raise RequestError(
                f"{run.said('do_train')}, but a pipeline run trains. To evaluate its folder, {run.without_pipeline}."
            )
        return str(asked or "pipeline")
    if not asked and launch.launcher == "deepspeed" and run.value("do_train"):
        asked = "zero2"
    if not asked or asked == "none":
        return None
    if not run.value("do_train"):
        mend = "Launch without DeepSpeed" if by_accelerate else "Set --deepspeed none"
        shards = f"DeepSpeed ({asked}, by accelerate)" if by_accelerate else said
        raise RequestError(f"{shards}, which shards training, but {run.said('do_train')}. {mend}.")
    return str(asked)


def stated_precision(asked: str | None) -> dict[str, bool]:
    """The `bf16` and `fp16` that a DeepSpeed config states explicitly; empty if it leaves them to the run."""
    if not asked:
        return {}
    try:
        config = Config(parse(read(find_config(asked))).value)
    except NotJsonError:
        return {}  # reported when the config is loaded
    found = {name: config.get(f"{name}.enabled") for name in ("bf16", "fp16")}
    return {name: value for name, value in found.items() if isinstance(value, bool)}


def context_of(
    run: Run,
    precision: Mapping[str, bool],
    has_cuda: bool | None,
    gpu_capability: tuple[int, int] | None = None,
    **others: Any,
) -> Context:
    """The context of a run for the rules. `precision`: the Trainer's bf16 and fp16, as far as known; `others`: fields
    of Context that a run does not determine."""
    launch = run.launch
    arguments = {name: run.value(name) for name in RULED} | dict(precision)
    arguments |= {name: run.given[name] for name in ONLY_IF_GIVEN if name in run.given}
    known: dict[str, Any] = {
        "world_size": launch.world_size,
        "ranks_per_node": launch.local_world_size,
        "has_cuda": has_cuda,
        "output_dir": str(run.value("output_dir")),
        "arguments": arguments,
        "nvme_path": run.value("nvme_path"),
        "pipeline_parallel_size": run.stages,
        "sequence_parallel_size": run.sequence_parallel_size,
        "expert_parallel_size": run.expert_parallel_size,
        "gpu_capability": gpu_capability,
    }
    return Context(**{**known, **others})


def load_deepspeed(run: Run, asked: str, context: Context) -> Loaded:
    """Read and check the config for this run. Raises RequestError with all its errors."""
    found = load(asked, context, run.value("disable_check") or ())
    refuse_under_zero3(run, found.config, found.name)
    return found


def refuse_unused_disk(run: Run, config: Mapping[str, Any], name: str) -> None:
    """Raises RequestError unless --nvme_path is used: it fills a config that offloads to a disk and names no folder."""
    used = [section.get("nvme_path") for section in on_disk(config)]
    asked = run.value("nvme_path")
    file, *files = (run.source(name).rpartition(" line ")[0] for name in ("nvme_path", *FLAGS))
    is_used = asked and Path(asked).expanduser() in [Path(one).expanduser() for one in used if one]
    if asked and not is_used and file in files:  # a YAML without a config serves several launches
        found = f"offloads to {used[0]}" if used else "offloads nothing to a disk"
        raise RequestError(f"{run.said('nvme_path')}, which does nothing: {name} {found}. Drop it, or use zero3_nvme.")


def refuse_under_zero3(run: Run, config: Mapping[str, Any], name: str) -> None:
    """Raises RequestError for what ZeRO-3 cannot do. For the batch size, transformers 5.23 would after loading the
    model (trainer.py, create_accelerator_and_postprocess)."""
    if Config(config).stage != 3:
        return
    check_sharded(run)
    if run.value("auto_find_batch_size"):
        raise RequestError(f"{run.said('auto_find_batch_size')}, which ZeRO-3 ({name}) cannot do. Drop it.")
