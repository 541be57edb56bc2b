"""A cell by DDP: which of a benchmark's cells is its base, and the ratio. Never imports torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

BASE = "ddp"
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What a cell and its DDP share, but for layout, micro-batch and checkpointing."""

    model: str
    world_size: int
    global_batch: int
    precision: str


@dataclass(frozen=True)
class Place:
    setting: Setting
    layout: str
    micro_batch: int
    checkpoint_interval: int


def base_of(one: T, others: Iterable[T], place_of: Callable[[T], Place]) -> T | None:
    """The DDP of the same setting, without checkpointing; of the same micro-batch if there is one."""
    place = place_of(one)
    same: list[tuple[bool, int, T]] = []
    for other in others:
        theirs = place_of(other)
        if theirs.layout == BASE and not theirs.checkpoint_interval and theirs.setting == place.setting:
            same.append((theirs.micro_batch != place.micro_batch, len(same), other))
    return min(same, key=lambda entry: entry[:2])[2] if same else None


def paired(ours: Mapping[Any, float], base: Mapping[Any, float]) -> float | None:
    """The ratio of figures by repeat: the median over repeats of both, for they are interleaved, so that each pair saw
    the same machine; else that of the medians. None without figures, or where the base's are 0."""
    ratios = [value / base[repeat] for repeat, value in ours.items() if base.get(repeat)]
    if ratios:
        return statistics.median(ratios)
    middle = statistics.median(base.values()) if base else 0.0
    return statistics.median(ours.values()) / middle if ours and middle else None
