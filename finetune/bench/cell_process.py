"""From a cell to the command that runs it; and why some are not run at all. Never imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.bench.grid import Cell, Grid
from finetune.bench.layouts import LAYOUTS
from finetune.bench.models import IN_STAGES
from finetune.dsconfig.load import find_config
from finetune.host.hardware import cores_here, gpus_here
from finetune.measure.processes import DEEPSPEED, started, words

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "benchmark.py"


def why_not(cell: Cell, gpus: int | None = None, cores: int | None = None) -> str | None:
    """The reason for which a cell cannot be, on this machine or at all; None where it can be tried."""
    gpus, cores = gpus_here() if gpus is None else gpus, cores_here() if cores is None else cores
    if cell.world_size > (gpus or cores):
        return f"{cell.world_size} ranks are more than this machine's {gpus or cores} {'GPU(s)' if gpus else 'core(s)'}"
    if cell.layout in ("ddp", "fsdp") and cell.world_size == 1:
        return f"{cell.layout} is of several ranks, and this is one: it would be `none`"
    if LAYOUTS[cell.layout].has_stages and cell.model not in IN_STAGES:
        return f"{cell.model} is no list of layers that a pipeline could cut; {', '.join(IN_STAGES)} are"
    return None


def flags_of(cell: Cell) -> dict[str, Any]:
    """Those of the recipe that the layout and the batch are, but for --deepspeed, whose file is found or made."""
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
    """What is started; the ranks write their figures into `folder`."""
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
    if not layout.flags.get("fsdp"):
        flags["deepspeed"] = find_config(cell.ds_config).resolve() if cell.ds_config else "none"
    if layout.launcher == DEEPSPEED and not layout.has_stages:
        flags["nvme_path"] = folder / "nvme"
    return [*started(layout.launcher, cell.world_size), str(RECIPE), *words(flags)]
