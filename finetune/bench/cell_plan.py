"""What `finetune plan` says of a cell, to stand beside what was measured. Never imports torch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from finetune.bench.grid import Cell
from finetune.bench.layouts import LAYOUTS
from finetune.bench.models import TEXT, BenchModel
from finetune.errors import RequestError
from finetune.plan.families import FAMILIES
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of
from finetune.plan.plan import kinds_of_rank
from finetune.plan.request import Asked, job_of
from finetune.plan.seconds import plan_seconds

PER_NODE = 8  # ranks of a node, of plans for more than a machine has


def machine_for(name: str | None, gpus: list[str]) -> Machine | None:
    """By name or file; without one that of this machine, where a profile of it is known. Raises RequestError."""
    if name is not None:
        return find_machine(name)
    try:
        return find_machine(gpus[0] if gpus else "cpu")
    except RequestError:
        return None


def parameters_of(model: BenchModel) -> int | None:
    """None of a family that `finetune plan` does not know."""
    return model_of(model.config).parameters if model.config["model_type"] in FAMILIES else None


def planned(cell: Cell, model: BenchModel, machine: Machine | None) -> dict[str, Any] | None:
    """`peak_bytes` of the fullest rank in a step and `step_seconds`; None of what is not planned: AlexNet, FSDP,
    pipelines of other models than GPT-lite, and what would be refused."""
    layout = LAYOUTS[cell.layout]
    if machine is None or model.config["model_type"] not in FAMILIES or layout.flags or cell.accumulation is None:
        return None
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(model.config))
        try:
            job, _, _ = job_of(_asked(cell, model, config), machine)
            peak = max(plan_memory(job, machine, rank).step_peak.bytes for rank in kinds_of_rank(job))
            seconds = plan_seconds(job, machine).total
        except RequestError:
            return None
    return {"peak_bytes": peak, "step_seconds": seconds, "machine": machine.name}


def _asked(cell: Cell, model: BenchModel, config: Path) -> Asked:
    values: dict[str, Any] = {
        "model_name_or_path": str(config),
        "per_device_train_batch_size": cell.micro_batch,
        "gradient_accumulation_steps": cell.accumulation,
        "per_device_eval_batch_size": 0,
        "activation_checkpoint_interval": cell.checkpoint_interval,
        "loss_chunk_tokens": 0,
        "bf16": cell.precision == "bf16",
        "fp16": cell.precision == "fp16",
        "deepspeed": cell.ds_config or "none",
    }
    if model.name in TEXT:
        values["max_seq_length" if model.name == "distilbert" else "block_size"] = model.sequence_tokens
    if model.image_size:
        values["image_size"] = model.image_size
    if LAYOUTS[cell.layout].has_stages:
        values["pipeline_parallel_size"] = cell.stages
    return Asked(values, cell.world_size, min(cell.world_size, PER_NODE))
