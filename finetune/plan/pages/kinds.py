"""Which kinds of memory and of ranks a plan has, in the order in which every table and picture shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from finetune.plan.engines.pipeline import PIPE
from finetune.plan.engines.resident import BUCKETS, GATHERED, GRADIENTS, MASTERS, PARAMETERS, STATES
from finetune.plan.memory import BATCH, BUFFERS, SAVED, WORKSPACE
from finetune.plan.program import ACTIVATIONS, GRADIENTS_FLOW, TEMPORARY

if TYPE_CHECKING:
    from finetune.plan.memory import RankMemory
    from finetune.plan.plan import Plan

ORDER = (PARAMETERS, GATHERED, MASTERS, STATES, GRADIENTS, BUCKETS, PIPE, WORKSPACE, BUFFERS, BATCH, ACTIVATIONS,
         GRADIENTS_FLOW, TEMPORARY, SAVED)  # fmt: skip


def in_order(kinds: Iterable[str]) -> list[str]:
    """As they are stacked in every table and picture, from what stays to what comes and goes."""
    return sorted(kinds, key=lambda kind: (ORDER.index(kind) if kind in ORDER else len(ORDER), kind))


def rank_kinds(plan: Plan) -> list[tuple[str, RankMemory]]:
    """By name; neighbours that hold the same are one, though but one of them saves weights."""
    groups: list[list[RankMemory]] = []
    for rank in plan.ranks:
        if groups and _held(groups[-1][0]) == _held(rank):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    word = "stage" if plan.job.stages > 1 else "rank"
    names = [f"{word} {one[0].rank}" if len(one) == 1 else f"{word}s {one[0].rank}-{one[-1].rank}" for one in groups]
    return [(name, max(one, key=lambda rank: rank.host_bytes)) for name, one in zip(names, groups, strict=True)]


def _held(rank: RankMemory) -> tuple[object, ...]:
    return rank.resident, rank.peak, rank.host


def fills_host(plan: Plan) -> bool:
    """Whether a table of it is worth its lines: with offload, or where it is a tenth of what there is."""
    return any(any(rank.host.values()) for rank in plan.ranks) or plan.host_bytes > plan.host_limit_bytes / 10
