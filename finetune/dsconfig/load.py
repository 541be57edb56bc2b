"""From a name or a path to a config that the Trainer accepts: found, read, checked, and filled where only we can."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.dsconfig.check import check, read
from finetune.dsconfig.config import Config
from finetune.dsconfig.context import NVME_FOLDER, Context
from finetune.dsconfig.formats import line
from finetune.dsconfig.rules.optimizer import is_left_to_the_trainer
from finetune.errors import RequestError, or_meant
from finetune.shipped import DS_CONFIGS, is_recipes_yaml

OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class Loaded:
    """`config` is ready for `TrainingArguments(deepspeed=...)`; `notes` are lines to print once."""

    name: str
    config: dict[str, Any]
    notes: tuple[str, ...]


def find_config(name_or_path: str) -> Path:
    """The file at a path, or of a shipped name such as `zero2`. Raises RequestError that lists the shipped names."""
    path = Path(name_or_path).expanduser()
    if is_recipes_yaml(name_or_path):
        raise RequestError(f"{name_or_path} is a recipe's YAML, for --config. Give a DeepSpeed config (JSON).")
    if os.path.isfile(path):  # False also for a name that is too long for a path
        return path
    shipped = DS_CONFIGS / f"{name_or_path.removesuffix('.json')}.json"
    if "/" not in name_or_path and os.path.isfile(shipped):
        return shipped
    if name_or_path.lstrip().startswith("{"):
        raise RequestError(
            "a DeepSpeed config is given as JSON, but it must be in a file. Write it to one, and give its path."
        )
    names = sorted(p.stem for p in DS_CONFIGS.glob("*.json"))
    meant = or_meant(name_or_path, names)
    there = ", ".join(names) or f"none, because {DS_CONFIGS.name}/ is missing"
    raise RequestError(
        f"{name_or_path}: there is no such DeepSpeed config.{meant} Give a path, or a shipped name: {there}."
    )


def load(name_or_path: str, run: Context, disabled: Collection[str] = ()) -> Loaded:
    """Read a config and check it against `run`, except for the codes in `disabled`. Raises RequestError with all
    errors at once."""
    path = find_config(name_or_path)
    if form := [code for code in disabled if code.startswith(("DS0", "DS1"))]:
        raise RequestError(f"--disable_check {form[0]}: a malformed config cannot be used. Fix it instead.")
    report = check(read(path), run, disabled)
    if report.errors:
        raise RequestError("\n".join(line(path.name, placed) for placed in report.errors))
    assert isinstance(report.value, dict)
    return Loaded(path.stem, resolve(report.value, run), tuple(line(path.name, placed) for placed in report.found))


def resolve(config: dict[str, Any], run: Context) -> dict[str, Any]:
    """Fill the "auto" values that the Trainer does not know, and drop the sections that the Trainer handles better.

    A section that is all "auto" means: as the Trainer would. So the Trainer's own optimizer and schedule are used. They
    exempt biases and norms from weight decay, and without warmup start at the full rate; DeepSpeed's do neither
    (transformers/integrations/deepspeed.py passes one flat list of parameters; deepspeed/runtime/lr_schedules.py raises
    the warmup to two steps). With offload the caller must build DeepSpeedCPUAdam: `wants_cpu_adam` says when.
    """
    config = copy.deepcopy(config)
    for name in ("fp16", "bf16"):
        if Config(config).is_auto(f"{name}.enabled") and name in run.arguments:
            config[name]["enabled"] = run.arguments[name]
    for name in ("optimizer", "scheduler"):
        if name in config and is_left_to_the_trainer(config[name]):
            del config[name]
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.get(name) is None:
            config[name] = "auto"
    zero = config.get("zero_optimization", {})
    if run.expert_parallel_size > 1:
        # Without these two, one all-reduce over all ranks would add up the gradients of different experts (deepspeed
        # 0.19.8, runtime/zero/stage_1_and_2.py, average_tensor and buffered_reduce_fallback); with them, gradients
        # cannot be divided beforehand.
        zero["reduce_scatter"] = zero["contiguous_gradients"] = True
        config["prescale_gradients"] = False
    if zero.get("zero_hpz_partition_size") == "auto":
        zero["zero_hpz_partition_size"] = run.ranks_per_node
    for section in on_disk(config):
        if _is_left_open(section):
            section["nvme_path"] = run.nvme_path or str(Path(run.output_dir).expanduser() / NVME_FOLDER)
    if run.has_cuda is False:  # nothing to pin for without a GPU
        for section in filter(None, map(zero.get, OFFLOADS)):
            section["pin_memory"] = False
    return _filled_for_pipeline(config, run) if run.pipeline_parallel_size is not None else config


def _filled_for_pipeline(config: dict[str, Any], run: Context) -> dict[str, Any]:
    """Filled as by the Trainer, but with data-parallel ranks instead of all ranks: stages share their samples."""
    arguments = run.arguments
    names = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
    }
    values = {name: arguments[source] for name, source in names.items() if source in arguments}
    if len(values) == len(names):
        assert run.data_parallel_size is not None, "a run that is about to start knows its ranks"
        micro, steps = values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]
        values["train_batch_size"] = micro * steps * run.data_parallel_size
    for name, value in values.items():
        if config.get(name, "auto") == "auto":
            config[name] = value
    types = config.setdefault("data_types", {})
    if types.get("grad_accum_dtype", "auto") == "auto":
        # A pipeline sums the gradients of many micro-batches, which bf16 would round away. With fp16, DeepSpeed 0.19.8
        # does not sum tied gradients kept in another dtype (runtime/pipe/engine.py, _exec_reduce_tied_grads).
        types["grad_accum_dtype"] = "fp16" if config.get("fp16", {}).get("enabled") else "fp32"
    # DeepSpeed gets a ready-made optimizer, and by default accepts only variants of Adam.
    config["zero_allow_untested_optimizer"] = True
    return config


def on_disk(config: Any) -> list[dict[str, Any]]:
    """The sections that offload to a disk."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    sections = map(zero.get, OFFLOADS) if isinstance(zero, dict) else ()
    return [section for section in sections if isinstance(section, dict) and section.get("device") == "nvme"]


def wants_disk(config: Any) -> bool:
    """Whether it offloads to a disk and leaves the folder to --nvme_path."""
    return any(map(_is_left_open, on_disk(config)))


def _is_left_open(section: dict[str, Any]) -> bool:
    return bool(section.get("nvme_path", "auto") == "auto")


def wants_trainer_clipping(config: dict[str, Any]) -> bool:
    """True at stage 0 in fp32 with the Trainer's optimizer.

    DeepSpeed clips there, but discards the norm (deepspeed 0.19.8, runtime/engine.py, clip_fp32_gradients), so the log
    would lack it; the Trainer clips and keeps it instead.
    """
    halves = any(Config(config).get(f"{name}.enabled") for name in ("fp16", "bf16"))
    return config.get("zero_optimization", {}).get("stage", 0) == 0 and not halves and "optimizer" not in config


def wants_cpu_adam(config: dict[str, Any]) -> bool:
    """True if the optimizer's states are offloaded and no optimizer section remains for DeepSpeed to build from."""
    return Config(config).offload("offload_optimizer") != "none" and "optimizer" not in config
