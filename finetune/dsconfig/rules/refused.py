"""DS905: DeepSpeed features that this toolkit does not support. Its batch sizes, data, checkpoints and final model do
not take them into account: a run would end with an unusable folder, or with wrong numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding, error, warning
from finetune.dsconfig.shape import schema

# Sections that other rules check, or that do no harm.
KNOWN = (
    "activation_checkpointing aio bf16 bfloat16 checkpoint comet comms_logger csv_monitor data_types flops_profiler "
    "fp16 optimizer pipeline scheduler tensorboard timers torch_autocast wandb zero_optimization"
).split()
ZENFLOW, SUPER_OFFLOAD = "zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"
# Checked in addition to the schema's sections that are not KNOWN.
INSIDE = (ZENFLOW, SUPER_OFFLOAD, "checkpoint.load_universal", "checkpoint.writer", "sequence_parallel_size")
SWITCHES = {"tensor_parallel": "autotp_size", "compile": "deepcompile"}
INSTEAD = {
    "autotuning": "`finetune plan --autotune` tries layouts.",
    "checkpoint.load_universal": "--resume does it by itself, at any world size.",
    "data_efficiency": "The Trainer reads the data, not DeepSpeed's loader.",
    "expert_parallel": "recipes/causal_lm.py has a flag for it, --expert_parallel_size.",
    "sequence_parallel_size": "recipes/causal_lm.py has a flag for it, --sequence_parallel_size.",
    "tensor_parallel": "ZeRO-3, or recipes/causal_lm_pipeline.py, splits what one GPU cannot hold.",
}
OF_OTHERS = {  # read by something other than the engine (deepspeed 0.19.8, autotuning/autotuner.py)
    "autotuning": "is for `deepspeed --autotuning`, which writes its own configs from it; a plain run ignores it",
}


def toolkit_does_it(config: Config, run: Context) -> Iterator[Finding]:
    """DS905."""
    sections = [name for name, part in schema()["properties"].items() if "properties" in part or not part]
    others = [name for name in sections if name not in KNOWN]
    for place in (*others, *INSIDE):
        if not _is_on(config.get(place), place):
            continue
        if run.engine == "recipe":
            said = f"{place} is on, which this toolkit does not support: the run's log would be wrong."
            yield error("DS905", place, f"{said} {INSTEAD.get(place, '')} Delete it.".replace("  ", " "))
        elif place in OF_OTHERS:
            yield warning("DS905", place, f"{place} {OF_OTHERS[place]}. Delete it when you are done.")


def _is_on(value: Any, place: str = "") -> bool:
    """Whether a section, or a size, turns anything on. Most sections have a switch; others are on if present."""
    if isinstance(value, dict):
        switch = SWITCHES.get(place, "enabled")
        known = schema()["properties"].get(place, {}).get("properties", {}).get(switch, {})
        return _is_on(value.get(switch, known.get("default", bool(value))))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value > 1
    return value is True


RULES = (toolkit_does_it,)
