"""What `finetune plan` says of a cell, to stand beside what was measured. Never imports torch."""

from __future__ import annotations

from typing import Any

from finetune.bench.cell_process import flags_of
from finetune.bench.grid import Cell
from finetune.bench.layouts import LAYOUTS
from finetune.bench.models import BenchModel
from finetune.bench.recipe import BENCHMARK
from finetune.errors import RequestError
from finetune.measure.processes import words
from finetune.plan.families import FAMILIES
from finetune.plan.from_run import Subject, job_of
from finetune.plan.machine import Machine, find_machine
from finetune.plan.memory import plan_memory
from finetune.plan.model import model_of
from finetune.plan.plan import kinds_of_rank
from finetune.plan.seconds import plan_seconds
from finetune.run.launch import Launch
from finetune.run.resolve import resolve

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


def plan_of_cell(cell: Cell, model: BenchModel, machine: Machine | None) -> dict[str, Any] | None:
    """`peak_bytes` of the fullest rank in a step and `step_seconds`; None of what is not planned: AlexNet, FSDP,
    and what would be refused."""
    layout = LAYOUTS[cell.layout]
    if machine is None or model.config["model_type"] not in FAMILIES or layout.flags or cell.accumulation is None:
        return None
    flags = words(flags_of(cell) | {"deepspeed": cell.ds_config or "none"})
    launch = Launch(world_size=cell.world_size, local_world_size=min(cell.world_size, PER_NODE), launcher="torchrun")
    subject = Subject(model_of(model.config), model.sequence_tokens or 1, model.image_size)
    try:
        job, _, _ = job_of(resolve(BENCHMARK, flags, launch, is_here=False), machine, subject=subject)
        peak = max(plan_memory(job, machine, rank).step_peak.bytes for rank in kinds_of_rank(job))
        seconds = plan_seconds(job, machine).total
    except RequestError:
        return None
    return {"peak_bytes": peak, "step_seconds": seconds, "machine": machine.name}
