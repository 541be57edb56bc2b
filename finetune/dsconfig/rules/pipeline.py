"""DS8xx: runs with DeepSpeed's pipeline engine. These rules ignore all other runs."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Drop, Finding, Put, at, error
from finetune.dsconfig.rules.batch import OWN_AUTO, SIZES
from finetune.dsconfig.rules.optimizer import is_left_to_the_trainer

MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
DTYPE = "data_types.grad_accum_dtype"
# The "auto" values that finetune.dsconfig.load fills for a pipeline run.
FILLED = (*OWN_AUTO, *SIZES, "gradient_clipping", "fp16.enabled", "bf16.enabled", DTYPE)


def stage_fits_the_pipeline(config: Config, run: Context) -> Iterator[Finding]:
    """DS801. deepspeed 0.19.8, runtime/pipe/engine.py, asserts it after building the model."""
    if run.pipeline_parallel_size is None:
        return
    if config.stage in (2, 3):
        said = (
            f"zero_optimization.stage is {config.stage}, but pipeline parallelism takes at most 1. Use --deepspeed "
            "pipeline (the default), set it to 1 in your own file, or train without stages: drop "
            "--pipeline_parallel_size, or use recipes/causal_lm.py instead of causal_lm_pipeline.py."
        )
        yield error("DS801", "zero_optimization.stage", said, Put(at("zero_optimization.stage"), 1))
    if config.stage == 0:
        said = (
            "zero_optimization.stage is 0: in fp32 DeepSpeed discards the gradient norm there, and every "
            "pipeline keeps all optimizer states. Set it to 1, as the shipped `pipeline` does."
        )
        yield error("DS801", "zero_optimization.stage", said)


def states_stay_on_the_device(config: Config, run: Context) -> Iterator[Finding]:
    """DS802."""
    for what in ("offload_optimizer", "offload_param"):
        device = config.offload(what)
        if run.pipeline_parallel_size is not None and device != "none":
            said = (
                f"zero_optimization.{what}.device is {device}, but a pipeline run keeps its states on the device. "
                "Drop it and raise --pipeline_parallel_size to save memory, or train without stages."
            )
            yield error("DS802", f"zero_optimization.{what}", said, Drop(at(f"zero_optimization.{what}")))


def flags_make_the_optimizer(config: Config, run: Context) -> Iterator[Finding]:
    """DS803."""
    for name in ("optimizer", "scheduler"):
        section = config.section(name)
        if run.pipeline_parallel_size is not None and section and not is_left_to_the_trainer(section):
            said = (
                f"{name} sets values, but a pipeline run builds it from the Trainer's flags (--optim, --learning_rate, "
                '--lr_scheduler_type, ...). Delete the section, or write "auto" for its values.'
            )
            yield error("DS803", name, said, Drop(at(name)))


def tied_gradients_add_up(config: Config, run: Context) -> Iterator[Finding]:
    """DS804. deepspeed 0.19.8, runtime/pipe/engine.py, _exec_reduce_tied_grads, reads the gradients from elsewhere."""
    fp16 = config.is_on("fp16.enabled") or (config.is_auto("fp16.enabled") and run.arguments.get("fp16"))
    if run.pipeline_parallel_size is not None and fp16 and config.get(DTYPE) == "fp32":
        said = (
            f'{DTYPE} is "fp32" with fp16, for which DeepSpeed\'s pipeline does not sum tied gradients. Write "auto".'
        )
        yield error("DS804", DTYPE, said, Put(at(DTYPE), "auto"))


def weights_keep_their_place(config: Config, run: Context) -> Iterator[Finding]:
    """DS805."""
    for name in ("round_robin_gradients", "parameter_alignment"):
        place = f"zero_optimization.{name}"
        if run.pipeline_parallel_size is not None and config.is_on(place):
            said = (
                f"{place} reorders the weights in the optimizer, which a pipeline's checkpoints do not support. "
                "Delete it."
            )
            yield error("DS805", place, said, Drop(at(place)))


def monitors_are_off(config: Config, run: Context) -> Iterator[Finding]:
    """DS806. deepspeed 0.19.8, runtime/pipe/engine.py: the monitor reads a loss that `eval_batch` did not reduce."""
    for name in MONITORS:
        if run.pipeline_parallel_size is not None and config.is_on(f"{name}.enabled"):
            said = f"{name}: DeepSpeed's monitors fail in a pipeline's evaluation. Use --report_to instead."
            yield error("DS806", name, said, Drop(at(name)))


def every_auto_is_filled(config: Config, run: Context) -> Iterator[Finding]:
    """DS807. Only we fill an "auto" there; a remaining one ends the run in DeepSpeed, or is read as a string."""
    if run.pipeline_parallel_size is None:
        return
    for place in config.autos():
        if place.split(".")[0] not in ("optimizer", "scheduler") and place not in FILLED:
            drop = [] if "[" in place else [Drop(at(place))]
            said = f'{place} is "auto", which nothing fills in a pipeline run. Write a value, or delete it.'
            yield error("DS807", place, said, *drop)


def checkpoints_are_the_flags(config: Config, run: Context) -> Iterator[Finding]:
    """DS808. Only deepspeed.checkpointing.configure reads the section, and no engine calls it (deepspeed 0.19.8,
    runtime/activation_checkpointing/checkpointing.py, runtime/pipe/engine.py). Calling it here would not help:

    - partition_activations splits among tensor-parallel ranks (get_partition_size: mp_size is 1), and configure fails
      on a pipeline's own grid, which has no get_tensor_model_parallel_group.
    - cpu_checkpointing alone ends in an IndexError on a CPU: copy_to_device returns the tensor itself, which
      get_cpu_activations_for_backward then empties. With partition_activations, losses are right, and on a CPU nothing
      moves; on a GPU it is untested.
    - contiguous_memory_optimization makes a list of tensors, one per checkpoint (partition_activations).
    """
    section = config.section("activation_checkpointing")
    asked = [name for name, value in section.items() if value not in (False, None)]
    if run.pipeline_parallel_size is not None and asked:
        said = (
            f"activation_checkpointing ({', '.join(asked)}) does nothing in a pipeline: DeepSpeed's engine never reads "
            "it. Delete it; to save memory, use --activation_checkpoint_interval 1, or more stages."
        )
        yield error("DS808", "activation_checkpointing", said, Drop(at("activation_checkpointing")))
