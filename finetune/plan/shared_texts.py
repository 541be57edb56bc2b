"""Runs whose ranks share texts (--sequence_parallel_size) or experts (--expert_parallel_size), what makes room for long
texts, tiles and checkpoints on the host, and masks of their documents."""

from __future__ import annotations

from typing import Any

from finetune.errors import RequestError
from finetune.plan.exchange import exchanges_of
from finetune.plan.forward.expert_parallel import PLANNED
from finetune.plan.job import Job, tape_of
from finetune.plan.values import ALL_TO_ALL, TILED_MLP
from finetune.run.engine import deepspeed_config_of
from finetune.run.facts import check_offloaded, checkpoints_on_host
from finetune.run.flags.expert_parallel import check_experts
from finetune.run.flags.groups import is_on
from finetune.run.flags.sequence_parallel import OF_DROPOUT, OF_EXPERTS, check_heads
from finetune.run.run import Run

# Flags that need DeepSpeed, and the layout of a run that names none, by the first that is on.
ASSUMED = {"expert_parallel_size": "zero2", "sequence_parallel_size": "zero3", "tiled_mlp_num_shards": "zero3"}


def with_deepspeed(run: Run, device: str, notes: list[str]) -> Run:
    """The run with DeepSpeed, if its flags need it, also where layouts are searched; adds a note. Raises RequestError
    for what needs a GPU."""
    if device == "cpu":
        check_offloaded(run)
    name = next((name for name in ASSUMED if is_on(run, name)), None)
    if name is None or deepspeed_config_of(run):
        return run
    if run.value("deepspeed") == "none":
        raise RequestError(f"{run.said('deepspeed')}, but {run.said(name)[2:]} needs DeepSpeed. Drop one of the two.")
    layout = ASSUMED[name]
    notes.append(f"--{name} needs DeepSpeed, and none is named: planned with --deepspeed {layout}")
    return run.settled(f"--{name}", deepspeed=layout)


def of_groups(run: Run) -> dict[str, Any]:
    """Fields of the job."""
    return {
        "document_mask": bool(run.value("document_mask")),
        "sequence_parallel_size": run.sequence_parallel_size,
        "expert_parallel_size": run.expert_parallel_size,
        "tiled_mlp_num_shards": run.value("tiled_mlp_num_shards") or 0,
        "checkpoints_on_host": checkpoints_on_host(run),
    }


def check_shared(run: Run, job: Job) -> None:
    """Raises RequestError for texts or experts that ranks cannot share, or whose attention or model is not planned, and
    for MLPs that a run does not compute in tiles (finetune.models.tiled_mlp)."""
    if job.tiled_mlp_num_shards:
        _check_tiles(run, job)
    if job.expert_parallel_size > 1:
        check_experts(job.model.sizes.config.get, job.expert_parallel_size, job.world_size)
        if job.model.family not in PLANNED:
            raise RequestError(
                f"{run.said('expert_parallel_size')}: it is planned for {', '.join(PLANNED)} only, and this is a "
                f"{job.model.family}. Drop it; ZeRO-3 shards experts like any weight, and is planned."
            )
    size, said = job.sequence_parallel_size, run.said("sequence_parallel_size")
    if size == 1:
        return
    check_heads(job.model.sizes.config.get, size, job.tokens, job.world_size)
    if job.tokens % size:
        raise RequestError(f"{said}, which does not divide the {job.tokens} tokens of a block. Change one of them.")
    if not exchanges_of(tape_of(job), ALL_TO_ALL)[0]:
        raise RequestError(
            f"{said}: only attention that runs as one fused kernel is planned, and this model's does not: in fp32 with "
            "grouped heads on a GPU, or with dropout on a CPU. Plan it in bf16, or without dropout."
        )


def _check_tiles(run: Run, job: Job) -> None:
    is_mixture = any(".experts." in tensor.name for tensor in job.model.tensors)
    ops = [] if is_mixture else [op for segment in tape_of(job).segments for op in segment.ops]
    places = [place for place, op in enumerate(ops) if op.name == TILED_MLP]
    after = [(op for op in ops[place + 1 :] if op.name != "hold") for place in places]
    why = (
        OF_EXPERTS
        if is_mixture
        else f"no MLP of a {job.model.family} is known by its name"
        if not places
        else OF_DROPOUT
        if any(next(names).name == "dropout" for names in after)
        else None
    )
    if why:
        raise RequestError(f"{run.said('tiled_mlp_num_shards')}: {why}. Drop it.")
