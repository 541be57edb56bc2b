"""Which layout wrote a checkpoint, and whether this run's engine can load it as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.dsconfig.config import Config
from finetune.errors import RequestError
from finetune.run.files import PIPELINE_RECORD
from finetune.training.checkpoints.tag import newest_tag
from finetune.training.reshard.portable import load_pickle
from finetune.training.reshard.zero_shards import model_file, shard_files


@dataclass(frozen=True)
class Sharding:
    """`engine` is "ddp" (the Trainer alone: one process or DDP), "fsdp", "deepspeed" or "pipeline". `offload` and
    `precision` apply to DeepSpeed: with them, states are kept elsewhere and files are named differently."""

    engine: str
    ranks: int
    zero_stage: int | None = None
    offload: str = "none"  # "cpu" and "nvme" are its other values
    precision: str = "fp32"
    expert_ranks: int = 1  # ranks that hold a mixture's experts together

    def __str__(self) -> str:
        count = f"{self.ranks} rank" + ("s" if self.ranks != 1 else "")
        if self.engine == "deepspeed":
            where = f", states on {self.offload}" if self.offload != "none" else ""
            where += f", experts over {self.expert_ranks} ranks" if self.expert_ranks > 1 else ""
            return f"{count} with ZeRO-{self.zero_stage}{where}"
        words = {"ddp": "without DeepSpeed", "fsdp": "with FSDP", "pipeline": "in a pipeline"}
        return f"{count} {words[self.engine]}"


def sharding_of(checkpoint: Path) -> Sharding:
    """The layout that wrote `checkpoint`, determined from its files. Raises RequestError."""
    random_states = len(list(checkpoint.glob("rng_state*.pth")))
    if (checkpoint / PIPELINE_RECORD).is_file():
        return Sharding("pipeline", random_states)
    if folder := newest_tag(checkpoint):
        found = of_config(load_pickle(model_file(folder))["ds_config"], random_states)
        return replace(found, ranks=len(shard_files(folder))) if found.zero_stage else found
    if (checkpoint / "optimizer.pt").is_file():
        return Sharding("ddp", random_states)
    if any(checkpoint.glob("optimizer_*")) or any(checkpoint.glob("pytorch_model_fsdp*")):
        return Sharding("fsdp", random_states)
    raise RequestError(
        f"--resume: {checkpoint} holds no optimizer states (--save_only_model), so it cannot be resumed. Start "
        "a new run from its weights with --model_name_or_path."
    )


def of_config(content: Any, ranks: int) -> Sharding:
    """The layout of a DeepSpeed run, from its config."""
    config = Config(content)
    devices = [config.offload(name) for name in ("offload_optimizer", "offload_param")]
    where = next((device for device in ("nvme", "cpu") if device in devices), "none")
    precision = next((name for name in ("bf16", "fp16") if config.is_on(f"{name}.enabled")), "fp32")
    experts = (config.count("expert_parallel.autoep_size") or 1) if config.is_on("expert_parallel.enabled") else 1
    return Sharding("deepspeed", ranks, config.count("zero_optimization.stage") or 0, where, precision, experts)


def can_load_as_it_stands(written: Sharding, here: Sharding) -> bool:
    """Whether no conversion is needed. Raises RequestError for a checkpoint that can be neither loaded nor moved."""
    if written == here or written.engine == here.engine != "deepspeed":
        return True  # the Trainer, FSDP and the pipeline load their own checkpoints on any number of ranks
    if here.offload == "nvme":
        raise RequestError(
            f"--resume: the checkpoint was written by {written}, but this run has {here}. States can be moved from "
            "NVMe, but not to it. Resume with the layout that wrote it, or with --deepspeed zero3_offload."
        )
    return written.engine == here.engine and written.zero_stage == here.zero_stage == 0
