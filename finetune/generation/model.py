"""The model that answers: whole on each rank, or sharded over ranks and the CPU by ZeRO-3."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from finetune.dsconfig.context import Context
from finetune.dsconfig.load import load
from finetune.errors import RequestError
from finetune.models.adapters import with_adapter
from finetune.models.causal import CausalSource, find_causal_source
from finetune.models.source import Kept, load_weights, positions_of
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.language import CausalModelArguments
from finetune.run.launch import Launch, accelerate_uses_deepspeed
from finetune.run.task import TEXT_GENERATION
from finetune.training import runtime

WAIT = timedelta(hours=2)  # for ranks with longer answers
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODEL_FLAG = "--model_name_or_path "  # how errors of finetune.models begin; here the model is named without a flag


@dataclass(frozen=True)
class Writer:
    """A model before its weights are loaded. `ds_config` is for ZeRO-3; None if each rank has the whole model."""

    arguments: CausalModelArguments
    source: CausalSource
    dtype: str
    has_cuda: bool
    ds_config: dict[str, Any] | None

    @property
    def tokenizer(self) -> Any:
        return self.source.tokenizer

    @property
    def positions(self) -> int:
        return positions_of(self.source.config.get_text_config())

    @property
    def shards(self) -> bool:
        return self.ds_config is not None

    @property
    def embedded(self) -> int:
        """The number of token ids with an embedding; a tokenizer may have more, for padding for example."""
        return int(self.source.config.get_text_config().vocab_size)

    def place(self, launch: Launch) -> str:
        """Where the model runs, in words."""
        sharded = "ZeRO-3 over " if self.shards else ""
        device = torch.cuda.get_device_name() if self.has_cuda else "CPU"
        return f"{sharded}{launch.world_size} rank(s) on {device}, {self.dtype}"

    def build(self, launch: Launch) -> Any:
        """The model with its adapter, on its device or sharded by ZeRO-3. Call it after `meet`."""
        kept_alive = self._shard_while_reading()
        assert self.source.pretrained is not None
        kept = Kept(self.dtype)
        model = load_weights(AutoModelForCausalLM, self.source.pretrained, self.source.config, self.arguments, kept)
        model = with_adapter(model, AdapterArguments(), self.source.adapter, TEXT_GENERATION.adapter).eval()
        if not self.shards:
            return model.to(device_of(launch, self.has_cuda))
        import deepspeed

        # Without an optimizer this is DeepSpeed's ZeRO-Inference: hooks gather each layer's weights as it runs.
        engine = deepspeed.initialize(model=model, config=self.ds_config)[0]
        engine.module.kept_alive = (engine, kept_alive)  # transformers needs the config whenever it generates
        return engine.module.eval()

    def _shard_while_reading(self) -> Any:
        if not self.shards:
            return None
        from transformers.integrations import HfDeepSpeedConfig

        return HfDeepSpeedConfig(self.ds_config)


def open_writer(asked: argparse.Namespace, launch: Launch) -> Writer:
    """The model that is `asked` for. Raises RequestError if it does not exist or cannot run this way."""
    runtime.quiet_libraries(launch)
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dtype = DTYPES[runtime.choose_precision(True)] if has_cuda else "float32"
    dtype = dtype if asked.dtype == "auto" else asked.dtype
    if dtype == "float16" and not has_cuda:
        raise RequestError("--dtype float16 is for GPUs without bf16. Give bfloat16 or float32 on a CPU.")
    arguments = CausalModelArguments(model_name_or_path=asked.model, trust_remote_code=asked.trust_remote_code)
    try:
        source = find_causal_source(arguments, None)
    except RequestError as error:
        raise RequestError(str(error).replace(MODEL_FLAG, "")) from error
    return Writer(arguments, source, dtype, has_cuda, _ds_config(asked, launch, dtype, has_cuda))


def _ds_config(asked: argparse.Namespace, launch: Launch, dtype: str, has_cuda: bool) -> dict[str, Any] | None:
    """The part of a ZeRO-3 training config that generation needs: where the weights are."""
    by_accelerate = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if accelerate_uses_deepspeed() else None
    name = asked.deepspeed or by_accelerate
    if name in (None, "none"):
        return None
    folder = str(Path(getattr(asked, "output", ".")).expanduser().absolute().parent)
    precision = {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    zero = load(name, Context(launch.world_size, launch.local_world_size, has_cuda, folder, precision)).config
    zero = zero.get("zero_optimization") or {}
    if zero.get("stage") != 3:
        raise RequestError(
            f"--deepspeed {name}: stages 0 to 2 shard gradients and optimizer states, which generation does not have. "
            "Give zero3 or zero3_offload, or leave it out: each rank then has the whole model."
        )
    kept = {key: value for key, value in zero.items() if value != "auto" and key != "offload_optimizer"}
    enabled = {key: {"enabled": value} for key, value in precision.items()}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": kept, **enabled}


def meet(launch: Launch, writer: Writer) -> None:
    """Set up this rank's threads and GPU, and connect it to the others. Raises RunError if they do not connect."""
    runtime.set_threads(launch, writer.has_cuda)
    if writer.has_cuda:
        torch.cuda.set_device(launch.local_rank)
    with runtime.explained_meeting(launch):
        if writer.shards:
            runtime.prepare_deepspeed(launch, writer.has_cuda, WAIT.total_seconds())
        elif launch.world_size > 1:
            distributed.init_process_group("nccl" if writer.has_cuda else "gloo", timeout=WAIT)


def device_of(launch: Launch, has_cuda: bool) -> torch.device:
    return torch.device("cuda", launch.local_rank) if has_cuda else torch.device("cpu")
