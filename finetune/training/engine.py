"""Which engine trains: DeepSpeed and with which config, FSDP, or neither. Flags, launcher and `accelerate` decide."""

from __future__ import annotations

import os
from typing import Any

import torch

from finetune.dsconfig.check import read
from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.load import Loaded, find_config, load
from finetune.dsconfig.parse import NotJsonError, parse
from finetune.errors import RequestError
from finetune.training.arguments import Request


def accelerate_uses_deepspeed() -> bool:
    """True under `accelerate launch` with DeepSpeed in its config or flags."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def accelerate_uses_fsdp() -> bool:
    """True under `accelerate launch` with FSDP in its config or flags."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def fsdp_of(request: Request) -> Any:
    """What --fsdp says: None, True, or words of the Trainer's older form. Raises RequestError where it cannot be."""
    asked = request.values.get("fsdp")
    if isinstance(asked, str) and asked.lower() in ("true", "false", "none", ""):
        asked = asked.lower() == "true" or None
    if asked and request.launch.world_size == 1:
        raise RequestError(
            "--fsdp shards over several ranks, and this is one. Drop it, or launch with `torchrun --nproc_per_node N`."
        )
    if (asked or accelerate_uses_fsdp()) and not request.values.get("do_train"):
        raise RequestError("--fsdp shards training, but --do_train is False. Drop it.")
    return asked


def deepspeed_config_of(request: Request) -> str | None:
    """The DeepSpeed config of the run, a shipped name or a path, or None for a run without DeepSpeed.

    --deepspeed or --deepspeed_config name a shipped config or a path; `none` switches it off. The deepspeed launcher
    uses zero2 by default, plain python and torchrun nothing. Under `accelerate launch` the choice is in its own config.
    """
    launch = request.launch
    asked = request.values.get("deepspeed") or request.values.get("deepspeed_config")
    by_accelerate = accelerate_uses_deepspeed()
    if request.value("fsdp") or accelerate_uses_fsdp():
        if by_accelerate or asked not in (None, "none"):
            raise RequestError(f"--fsdp and DeepSpeed ({asked or 'by accelerate'}) both shard the model. Keep one.")
        return None
    if by_accelerate and asked:
        raise RequestError(
            f"accelerate launch already sets DeepSpeed up, and --deepspeed {asked} asks for another config. Drop "
            "--deepspeed (also from a YAML), or launch with `deepspeed` or `torchrun` instead."
        )
    if by_accelerate:
        asked = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if request.stages is not None:
        if by_accelerate:
            raise RequestError(
                "accelerate launch sets DeepSpeed up for the Trainer, and a pipeline has an engine of its own. Launch "
                "with `deepspeed` or `torchrun`, or by an accelerate config without DeepSpeed."
            )
        if asked == "none":
            raise RequestError("--deepspeed none: a pipeline is DeepSpeed's. Drop it, or use recipes/causal_lm.py.")
        if not request.values.get("do_train"):
            raise RequestError("--do_train False: a pipeline run trains. Evaluate its folder by recipes/causal_lm.py.")
        return str(asked or "pipeline")
    if not asked and launch.launcher == "deepspeed" and request.values.get("do_train"):
        asked = "zero2"
    if not asked or asked == "none":
        return None
    if not request.values.get("do_train"):
        mend = "Launch without DeepSpeed" if by_accelerate else "Set --deepspeed none"
        raise RequestError(f"DeepSpeed ({asked}) shards training, but --do_train is False. {mend}.")
    return str(asked)


def stated_precision(asked: str | None) -> dict[str, bool]:
    """What a DeepSpeed config says of `bf16` and `fp16` in so many words; empty where it leaves them to the run."""
    if not asked:
        return {}
    try:
        config = Config(parse(read(find_config(asked))).value)
    except NotJsonError:
        return {}  # which is said when the config is loaded
    found = {name: config.get(f"{name}.enabled") for name in ("bf16", "fp16")}
    return {name: value for name, value in found.items() if isinstance(value, bool)}


def load_deepspeed(request: Request, asked: str, precision: dict[str, bool], has_cuda: bool) -> Loaded:
    """Read and check the config for this run. Raises RequestError with all that is wrong with it."""
    launch = request.launch
    names = (
        "per_device_train_batch_size gradient_accumulation_steps max_grad_norm learning_rate adam_beta1 adam_beta2 "
        "adam_epsilon weight_decay max_steps warmup_steps save_only_model load_best_model_at_end report_to "
        "bf16_full_eval fp16_full_eval"
    ).split()
    arguments = {name: request.value(name) for name in names} | precision
    # The defaults of these are nobody's wish, and a section of the config may say otherwise.
    arguments |= {name: request.given[name] for name in ("optim", "lr_scheduler_type") if name in request.given}
    run = Context(
        world_size=launch.world_size,
        ranks_per_node=launch.local_world_size,
        has_cuda=has_cuda,
        output_dir=request.values["output_dir"],
        arguments=arguments,
        nvme_path=request.values.get("nvme_path"),
        pipeline_parallel_size=request.stages,
        gpu_capability=torch.cuda.get_device_capability() if has_cuda else None,
    )
    return load(asked, run, request.values.get("disable_check") or ())
