"""What `finetune plan --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from finetune.plan.answers import speedup_of

if TYPE_CHECKING:
    from finetune.plan.answers import Answer, Cost
    from finetune.plan.job import Job
    from finetune.plan.memory import RankMemory
    from finetune.plan.plan import Plan
    from finetune.plan.search import Candidate, Found


def as_json(
    found: Plan, layouts: Found | None, ways_out: Sequence[Candidate], notes: list[str], answer: Answer | None,
    cost: Cost | None, one_more: Plan | None,
) -> dict[str, Any]:  # fmt: skip
    """Unscaled bytes and seconds. docs/plan.md lists the keys; removing or redefining one increments `schema`."""
    return {
        "schema": 1,
        "answer": None if answer is None else {
            **{name: getattr(answer, name) for name in ("question", "found", "next", "flags", "hours")},
            "options": [{"found": size, **_layout(one)} for size, one in answer.options],
        },
        "cost": None if cost is None else asdict(cost),
        "one_more": None if one_more is None else {
            "world_size": one_more.job.world_size, "speedup": speedup_of(found, one_more),
            "peak_bytes": one_more.peak_bytes, "fits": one_more.fits,
        },
        "job": _job(found.job),
        "machine": found.machine.name,
        "fits": found.fits,
        "limit_bytes": found.limit_bytes, "device_bytes": found.device_bytes,
        "ranks": [_rank(rank) for rank in found.ranks],
        "step_seconds": found.seconds.total,
        "parts": found.seconds.parts,
        "seconds": asdict(found.seconds),
        "samples_per_second": found.seconds.samples_per_second,
        "notes": notes,
        "ways_out": [_layout(one) for one in ways_out],
        "layouts": None if layouts is None else [_layout(one) for one in (*layouts.fitting, *layouts.failing)],
    }  # fmt: skip


def _layout(one: Candidate) -> dict[str, Any]:
    return {
        "layout": one.layout,
        "job": _job(one.plan.job),
        "peak_bytes": one.plan.peak_bytes,
        "host_bytes": one.plan.host_bytes,
        "step_seconds": one.plan.seconds.total,
        "samples_per_second": one.samples_per_second,
        "why_not": one.plan.why_not,
    }


def _job(job: Job) -> dict[str, Any]:
    names = ("engine", "world_size", "ranks_per_node", "stages", "micro_batch", "eval_batch", "tokens", "accumulation",
             "precision", "checkpoint_interval", "attention", "loss_chunk_tokens", "sequence_parallel_size",
             "expert_parallel_size", "tiled_mlp_num_shards", "device", "global_batch")  # fmt: skip
    return {
        "model": job.model.family,
        "parameters": job.model.parameters,
        **{name: getattr(job, name) for name in names},
        "zero": asdict(job.zero),
        "optimizer": job.optimizer.kind,
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    found = {name: getattr(rank, name) for name in ("rank", "resident", "resident_bytes", "host", "timeline")}
    peaks = {phase: moment.bytes for phase, moment in rank.peaks.items()}
    return {**found, "peak": asdict(rank.peak), "peaks": peaks}
