"""A cell's plan, the command that runs it, and why some cells cannot run. Never imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.bench.grid import LAYOUTS, Cell, Grid
from finetune.bench.models import IN_STAGES, BenchModel
from finetune.bench.recipe import BENCHMARK
from finetune.dsconfig.check import read
from finetune.dsconfig.load import find_config, wants_disk
from finetune.dsconfig.parse import parse
from finetune.errors import RequestError
from finetune.host.hardware import cores_here, gpus_here
from finetune.measure.processes import started, words
from finetune.plan.from_run import job_of
from finetune.plan.job import Job
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import KINDS, model_of
from finetune.plan.plan import kinds_of_rank
from finetune.plan.seconds import plan_seconds
from finetune.run.launch import Launch
from finetune.run.resolve import resolve
from finetune.shipped import RECIPES

RECIPE = RECIPES / "benchmark.py"
PER_NODE = 8  # ranks per node, in plans for more ranks than a machine has


def machine_for(name: str | None, gpus: list[str]) -> Machine | None:
    """The machine of a name or file; without one, this machine, or None if it has no profile. Raises RequestError."""
    if name is not None:
        return find_machine(name)
    try:
        return find_machine(gpus[0] if gpus else "cpu")
    except RequestError:
        return None


def parameters_of(model: BenchModel) -> int | None:
    """The number of parameters; None for a family that `finetune plan` does not know."""
    return model_of(model.config).parameters if model.config["model_type"] in KINDS else None


def plan_of_cell(cell: Cell, model: BenchModel, machine: Machine | None) -> dict[str, Any] | None:
    """`peak_bytes` of the fullest rank in a step, and `step_seconds`; None for AlexNet, which cannot be planned, and
    for cells that would be refused."""
    if machine is None or model.config["model_type"] not in KINDS:
        return None
    flags = words(flags_of(cell) | {"deepspeed": cell.ds_config or "none"})
    launch = Launch(world_size=cell.world_size, local_world_size=min(cell.world_size, PER_NODE), launcher="torchrun")
    subject = Job(model_of(model.config), tokens=model.sequence_tokens or 1, image_size=model.image_size)
    try:
        job, _, _ = job_of(resolve(BENCHMARK, flags, launch, is_here=False), machine, subject=subject)
        peak = max(plan_memory(job, machine, rank).step_peak.bytes for rank in kinds_of_rank(job))
        seconds = plan_seconds(job, machine).total
    except RequestError:
        return None
    return {"peak_bytes": peak, "step_seconds": seconds, "machine": machine.name}


def why_not(cell: Cell, gpus: int | None = None, cores: int | None = None) -> str | None:
    """Why a cell cannot run, on this machine or at all; None if it can be tried."""
    gpus, cores = gpus_here() if gpus is None else gpus, cores_here() if cores is None else cores
    if cell.world_size > (gpus or cores):
        return f"{cell.world_size} ranks are more than this machine's {gpus or cores} {'GPU(s)' if gpus else 'core(s)'}"
    if cell.layout in ("ddp", "fsdp") and cell.world_size == 1:
        return f"{cell.layout} needs several ranks, and this is one: it would be the same as `none`"
    if LAYOUTS[cell.layout].has_stages and cell.model not in IN_STAGES:
        return f"{cell.model} cannot be cut into pipeline stages; {', '.join(IN_STAGES)} can"
    return None


def flags_of(cell: Cell) -> dict[str, Any]:
    """The recipe's flags for the layout and the batch, except --deepspeed."""
    flags: dict[str, Any] = {
        "per_device_train_batch_size": cell.micro_batch,
        "gradient_accumulation_steps": cell.accumulation,
        "bf16": cell.precision == "bf16",
        "fp16": cell.precision == "fp16",
        **LAYOUTS[cell.layout].flags,
    }
    if cell.checkpoint_interval:
        flags["activation_checkpoint_interval"] = cell.checkpoint_interval
    if LAYOUTS[cell.layout].has_stages:
        flags["pipeline_parallel_size"] = cell.stages
    return flags


def command_of(cell: Cell, grid: Grid, folder: Path, on_cpu: bool) -> list[str]:
    """The command to start; the ranks write their measurements into `folder`."""
    layout = LAYOUTS[cell.layout]
    flags: dict[str, Any] = {
        "model": cell.model,
        "scale": grid.scale,
        "model_changes": json.dumps(grid.changes.get(cell.model, {})),
        "measured_steps": grid.steps,
        "unmeasured_steps": grid.warmup_steps,
        "result_dir": folder,
        "output_dir": folder / "run",
        "learning_rate": grid.learning_rate,
        "seed": grid.seed,
        "dataloader_num_workers": grid.dataloader_num_workers,
        "use_cpu": on_cpu,
        **flags_of(cell),
    }
    config = find_config(cell.ds_config).resolve() if cell.ds_config else None
    if not layout.flags.get("fsdp"):
        flags["deepspeed"] = config or "none"
    if config and wants_disk(parse(read(config)).value):
        flags["nvme_path"] = folder / "nvme"
    return [*started(layout.launcher, cell.world_size), str(RECIPE), *words(flags)]
