"""The flags of a pipeline run, and what is refused before anything is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from finetune.errors import RequestError
from finetune.training.flat_yaml import read_flat_yaml
from finetune.training.hub import by_hand

METHODS = "balanced, uniform, parameters, or type:REGEX"


@dataclass
class PipelineArguments:
    """How the model is spread over ranks."""

    pipeline_parallel_size: int = field(default=1, metadata={"help": "stages; the ranks must be a multiple of it"})
    partition_method: str = field(default="balanced", metadata={"help": f"how layers are shared out: {METHODS}"})
    schedule_step: int = field(
        default=5, metadata={"help": "the step in which each rank's doings are recorded and drawn; 0 for none"}
    )

    # Flags of other recipes or of the Trainer that a pipeline cannot honour, and what to do instead.
    refused: ClassVar[dict[str, str]] = {
        "streaming": "the first and the last stage of a pipeline read the data each for itself, in any order, which a "
        "stream does not give. Drop it, or use the recipe without a pipeline.",
        **dict.fromkeys(
            ("use_peft", "lora_r", "load_in_4bit"),
            "a pipeline trains all weights; LoRA is not supported. Use the recipe without a pipeline.",
        ),
        **dict.fromkeys(
            ("activation_checkpointing", "gradient_checkpointing"), "say --activation_checkpoint_interval 1 here."
        ),
        "fsdp": "a pipeline shards the model by layers already. Drop it, or use the recipe without a pipeline.",
        "torch_compile": "DeepSpeed's pipeline engine runs its layers as they are. Drop it.",
        "push_to_hub": f"a pipeline run does not push. Push its folder afterwards: {by_hand()}",
        "nvme_path": "a pipeline keeps its states on the device: more stages make room. Drop it.",
        "neftune_noise_alpha": "a pipeline's embeddings take no noise. Drop it.",
        "auto_find_batch_size": "a pipeline's micro-batch is fixed. Drop it.",
        "use_liger_kernel": "a pipeline's layers are as they are. Drop it.",
        "ddp_comm_hook": "DeepSpeed sends a pipeline's gradients. Drop it, or use the recipe without a pipeline.",
        "label_smoothing_factor": "a pipeline's loss has no smoothing. Drop it.",
        "do_predict": "a pipeline run trains and evaluates. Predict from its folder: --model_name_or_path FOLDER "
        "--do_train False, without --pipeline_parallel_size.",
        "class_weights": "a pipeline's loss counts every sample alike. Drop it.",
        "sync_batch_norm": "no model that is a pipeline here has batch norm. Drop it.",
    }


def asks_for_pipeline(argv: Sequence[str]) -> bool:
    """Of a recipe that has both engines: whether --pipeline_parallel_size is given, as a flag or in the file of
    --config."""
    flag = "pipeline_parallel_size"
    if any(word.split("=")[0] == f"--{flag}" for word in argv):
        return True
    path = next((word.partition("=")[2] for word in argv if word.startswith("--config=")), None)
    if path is None and "--config" in argv[:-1]:
        path = argv[list(argv).index("--config") + 1]
    return path is not None and read_flat_yaml(path).get(flag) is not None


# The Trainer's names of optimizers whose states have an element a weight, or none, and which ZeRO-1 takes as they are.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")


def check_pipeline(request: Any) -> None:
    """Raises RequestError for a layout that cannot be, and for flags that would not be honoured."""
    values, world = request.values, request.launch.world_size
    stages, step = request.stages, values.get("schedule_step", PipelineArguments.schedule_step)
    if stages < 1:
        raise RequestError(f"--pipeline_parallel_size is {stages}, but it must be 1 or more.")
    if world % stages:
        ranks = stages * -(-world // stages)
        mend = f"Launch with {ranks} ranks (`deepspeed --num_gpus {ranks}` or `torchrun --nproc_per_node {ranks}`)"
        mend += f", or give a divisor of {world}." if world > 1 else "."
        raise RequestError(
            f"--pipeline_parallel_size is {stages}, but this run has {world} rank(s), which is no multiple of it "
            f"(ranks = stages x pipelines). {mend}"
        )
    if step < 0:
        raise RequestError(f"--schedule_step is {step}, but it must be 0 (none) or more.")
    for name, why in PipelineArguments.refused.items():
        if str(values.get(name)).lower() not in ("none", "false", "0", "0.0", ""):
            raise RequestError(f"--{name}: {why}")
    optimizer = str(values.get("optim", OPTIMIZERS[0]))
    if optimizer not in OPTIMIZERS:
        raise RequestError(f"--optim {optimizer}: a pipeline's checkpoints know {', '.join(OPTIMIZERS)}. Give one.")
    if str(values.get("lr_scheduler_type", "")) == "reduce_lr_on_plateau":
        raise RequestError(
            "--lr_scheduler_type reduce_lr_on_plateau: DeepSpeed's engine steps the schedule, and knows no metric. "
            "Give another, cosine for instance."
        )
    _check_method(values.get("partition_method", PipelineArguments.partition_method))


def _check_method(method: str) -> None:
    if method in ("balanced", "uniform", "parameters"):
        return
    if not method.startswith("type:"):
        raise RequestError(f"--partition_method {method}: give {METHODS}.")
    try:
        re.compile(method.removeprefix("type:"))
    except re.error as error:
        raise RequestError(f"--partition_method {method}: is no regular expression ({error}).") from error
