"""DS9xx: leftovers in the file that do nothing, cost time, or should not be there.

DS905: DeepSpeed features that this toolkit does not support. Its batch sizes, data, checkpoints and final model do not
take them into account: a run would end with an unusable folder, or with wrong numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error, named, warning
from finetune.dsconfig.shape import schema
from finetune.privacy import is_secret

# Settings that cost time in every step, and why.
PROFILERS = {
    "wall_clock_breakdown": "times every part of every step, and waits for the GPU each time",
    "memory_breakdown": "reads the memory counters in every step",
    "dump_state": "prints the whole state of the engine",
    "flops_profiler.enabled": "profiles a step, and turns on wall_clock_breakdown for all of them",
    "comms_logger.enabled": "times every collective, and waits for each",
    "activation_checkpointing.profile": "times every recomputation",
}

SWITCHED = ("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler", "torch_autocast")


def checkpointing_is_the_trainers(config: Config, run: Context) -> Iterator[Finding]:
    """DS901. The section is read by deepspeed.checkpointing, which Hugging Face models do not call."""
    section = config.section("activation_checkpointing")
    if (
        run.has_trainer
        and run.pipeline_parallel_size is None
        and any(value not in (False, None) for value in section.values())
    ):
        said = (
            "activation_checkpointing does nothing under the Trainer: Hugging Face models use torch's activation "
            "checkpointing. Use --activation_checkpointing, and delete the section."
        )
        yield warning("DS901", "activation_checkpointing", said, Drop(at("activation_checkpointing")))


def profilers_are_off(config: Config, run: Context) -> Iterator[Finding]:
    """DS902."""
    for place, cost in PROFILERS.items():
        if config.is_on(place):
            yield warning(
                "DS902", place, f"{place} is on: it {cost}. Set it to false when you are done.", Put(at(place), False)
            )


def monitors_are_the_trainers(config: Config, run: Context) -> Iterator[Finding]:
    """DS903. Two writers for one run."""
    reports = str(run.arguments.get("report_to"))
    for name in ("tensorboard", "wandb", "comet"):
        if run.has_trainer and config.is_on(f"{name}.enabled") and (name in reports or f"{name}_ml" in reports):
            said = f"{name}.enabled is true and --report_to names it, too: the run is logged twice. Delete the section."
            yield warning("DS903", name, said, Drop(at(name)))


def steps_can_be_divided(config: Config, run: Context) -> Iterator[Finding]:
    """DS906. Steps are counted modulo this number (deepspeed 0.19.8, runtime/engine.py, _take_model_step); accelerate
    1.15 sets it to infinity (utils/dataclasses.py, DeepSpeedPlugin), and a pipeline uses the file's value."""
    place = "steps_per_print"
    found, is_read = config.get(place), run.engine == "deepspeed" or run.pipeline_parallel_size is not None
    if found == 0 or (isinstance(found, str) and found != "auto"):
        shown = f'"{found}"' if isinstance(found, str) else "0"
        does = "by which a step cannot be divided: the first one fails" if is_read else "which accelerate overwrites"
        said = f"{place} is {shown}, {does}. Write null to print nothing."
        yield (error if is_read else warning)("DS906", place, said, Put(at(place), None))


def sections_are_on_or_off(config: Config, run: Context) -> Iterator[Finding]:
    """DS907. Each of these has a switch that is off by default (deepspeed 0.19.8, monitor/config.py, comm/config.py,
    profiling/config.py, runtime/constants.py)."""
    for name in SWITCHED:
        if config.section(name) and not config.has(f"{name}.enabled"):
            said = f"{name} has no enabled, which is false by default: it does nothing. Add it, or delete the section."
            yield warning("DS907", name, said)


def nothing_is_secret(config: Config, run: Context) -> Iterator[Finding]:
    """DS904. DeepSpeed prints its config at startup, and it is saved in the run folder. The value is never shown."""
    for path, value in config.texts():
        if is_secret(str(path[-1]) if path else "", value):
            yield Finding(
                "DS904",
                "error",
                path,
                f"{named(path)} looks like a secret, and DeepSpeed prints its config at startup. Remove it from "
                "the file and set it in the environment (HF_TOKEN, WANDB_API_KEY); change it if the file was ever "
                "shared.",
            )


# Sections that other rules check, or that do no harm.
KNOWN = (
    "activation_checkpointing aio bf16 bfloat16 checkpoint comet comms_logger csv_monitor data_types flops_profiler "
    "fp16 optimizer pipeline scheduler tensorboard timers torch_autocast wandb zero_optimization"
).split()
ZENFLOW, SUPER_OFFLOAD = "zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"
# Checked in addition to the schema's sections that are not KNOWN.
INSIDE = (ZENFLOW, SUPER_OFFLOAD, "checkpoint.load_universal", "checkpoint.writer", "sequence_parallel_size")
SWITCHES = {"tensor_parallel": "autotp_size", "compile": "deepcompile"}
WRONG_LOG = "the run's log would be wrong."
# docs/long_context.md, Tensor parallelism; deepspeed 0.19.8, runtime/engine.py, _apply_autotp_partitioning (the guess
# is module_inject/auto_tp.py, tp_parser) and runtime/state_dict_factory.py, merge_state_dict.
WHY = {
    "tensor_parallel": "ranks that share weights would have to read the same samples; DeepSpeed guesses how to divide "
    "models without a tensor-parallel plan, and trains GPT-lite wrongly without an error; and its checkpoints load at "
    "the same size only.",
}
INSTEAD = {
    "autotuning": "`finetune plan --autotune` tries layouts.",
    "checkpoint.load_universal": "--resume does it by itself, at any world size.",
    "data_efficiency": "The Trainer reads the data, not DeepSpeed's loader.",
    "expert_parallel": "--expert_parallel_size of recipes/causal_lm.py sets it.",
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
            said = f"{place} is on, which this toolkit does not support: {WHY.get(place, WRONG_LOG)}"
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
