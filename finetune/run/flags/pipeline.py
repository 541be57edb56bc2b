"""The flags of a pipeline run, and their checks before anything is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from finetune.errors import RequestError, plain
from finetune.run.files import by_hand
from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE, flag
from finetune.run.flags.compression import OF_DDP
from finetune.run.flags.groups import shape_shown
from finetune.run.on_resume import GOES_ON

if TYPE_CHECKING:
    from finetune.run.run import Run

METHODS = "balanced, uniform, parameters, or type:REGEX"


@dataclass
class PipelineArguments:
    """How the model is distributed over ranks."""

    pipeline_parallel_size: int | None = flag(
        None, "number of pipeline stages; the number of ranks must be a multiple of it", GOES_ON, range=AT_LEAST_ONE
    )
    partition_method: str = flag("balanced", f"how layers are divided among stages: {METHODS}", GOES_ON)
    schedule_step: int = flag(5, "step whose schedule is recorded and drawn; 0: none", GOES_ON, range=NOT_NEGATIVE)

    # Flags of other recipes or of the Trainer that a pipeline does not support, and what to do instead.
    refused: ClassVar[dict[str, str]] = {
        "streaming": "the first and last stages of a pipeline each read the data separately, in any order, which a "
        "stream does not support. Drop it, or use the recipe without a pipeline.",
        **dict.fromkeys(
            ("use_peft", "lora_r", "load_in_4bit"),
            "a pipeline trains all weights; LoRA is not supported. Use the recipe without a pipeline.",
        ),
        **dict.fromkeys(
            ("activation_checkpointing", "gradient_checkpointing"), "use --activation_checkpoint_interval 1 instead."
        ),
        "sequence_parallel_size": "a pipeline's stages read whole texts. Use the recipe without a pipeline.",
        "expert_parallel_size": "each stage of a pipeline holds all experts of its layers. Use recipes/causal_lm.py.",
        "fsdp": "a pipeline already shards the model by layers. Drop it, or use the recipe without a pipeline.",
        "torch_compile": "DeepSpeed's pipeline engine does not compile its layers. Drop it.",
        "push_to_hub": f"a pipeline run does not push. Push its folder afterwards: {by_hand()}",
        "nvme_path": "a pipeline keeps its states on the device; more stages save memory. Drop it.",
        "neftune_noise_alpha": "a pipeline does not add noise to embeddings. Drop it.",
        "auto_find_batch_size": "a pipeline's micro-batch is fixed. Drop it.",
        "use_liger_kernel": "a pipeline does not replace its layers' kernels. Drop it.",
        "ddp_comm_hook": "DeepSpeed sends a pipeline's gradients. Drop it, or use the recipe without a pipeline.",
        **dict.fromkeys(
            (*OF_DDP, "ddp_backend", "accelerator_config"),
            "DeepSpeed's engine runs a pipeline, without DistributedDataParallel and Accelerate. Drop it.",
        ),
        "debug": "it does not work with a pipeline's engine. Drop it.",
        "eval_accumulation_steps": "a pipeline's evaluation keeps no predictions. Drop it.",
        "label_smoothing_factor": "a pipeline's loss has no smoothing. Drop it.",
        "do_predict": "a pipeline run trains and evaluates. Predict from its folder: --model_name_or_path FOLDER "
        "--do_train False, without --pipeline_parallel_size.",
        "class_weights": "a pipeline's loss weights all samples equally. Drop it.",
        "sync_batch_norm": "no pipeline model here has batch norm. Drop it.",
    }


# The Trainer's names of optimizers whose states have one element per weight, or none, and which ZeRO-1 supports.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")


def look_at_kind(run: Run) -> None:
    """Raises RequestError if a folder's config.json, or --model_size, shows a language model without a pipeline."""
    if run.stages is not None and "block_size" in run.recipe.flags and (shape := shape_shown(run)):
        flag = "model_name_or_path" if run.value("model_name_or_path") else "model_size"
        check_kind(shape.get("model_type"), run.said(flag))


def check_kind(kind: object, said: str) -> None:
    """Raises RequestError for a language model other than a GPT-lite; `said` is how it was asked for."""
    if kind != "gptlite":
        raise RequestError(
            f"{said}: is a {plain(str(kind))}, and only a GPT-lite runs as a pipeline here. Use recipes/causal_lm.py, "
            "or write its layers as docs/pipeline.md shows."
        )


def pipeline_faults(run: Run) -> Iterator[str]:
    """An impossible layout, and flags that would be ignored."""
    values, world = run.values, run.launch.world_size
    stages = int(run.stages or 0)
    if world % stages:
        ranks = stages * -(-world // stages)
        mend = f"Launch with {ranks} ranks (`deepspeed --num_gpus {ranks}` or `torchrun --nproc_per_node {ranks}`)"
        mend += f", or give a divisor of {world}." if world > 1 else "."
        yield (
            f"{run.said('pipeline_parallel_size')}, but this run has {world} rank(s), which is not a multiple of "
            f"{stages} (ranks = stages x pipelines). {mend}"
        )
    for name, why in PipelineArguments.refused.items():
        if str(values.get(name)).lower() not in ("none", "false", "0", "0.0", ""):
            yield f"{run.said(name)}: {why}"
    kwargs = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    for name in (name for name in kwargs if run.value(name)):
        if set(run.value(name)) != {"offload"}:
            yield f"{run.said(name)}: a pipeline reads only offload there. Drop the others."
    if run.value("skip_memory_metrics") is False:
        yield f"{run.said('skip_memory_metrics')}: a pipeline always reports its memory. Drop it."
    if str(run.value("optim")) not in OPTIMIZERS:
        yield f"{run.said('optim')}, but a pipeline's checkpoints support only {', '.join(OPTIMIZERS)}. Give one."
    if str(run.value("lr_scheduler_type")) == "reduce_lr_on_plateau":
        yield (
            f"{run.said('lr_scheduler_type')}: DeepSpeed's engine steps the schedule without a metric. Use "
            "another, such as cosine."
        )
    method = run.value("partition_method")
    if method in ("balanced", "uniform", "parameters"):
        return
    if not method.startswith("type:"):
        yield f"{run.said('partition_method')}, but it must be {METHODS}."
    try:
        re.compile(method.removeprefix("type:"))
    except re.error as error:
        yield f"{run.said('partition_method')}: is not a valid regular expression ({error})."
