"""The published figures beside ours, as ratios: machines differ, and what a layout costs may be compared."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE = "ddp"
FILE = Path(__file__).with_name("published.json")
THROUGHPUT, AVERAGE_MEMORY = "throughput", "average memory"


@dataclass(frozen=True)
class Published:
    """`figure` of a layout by that of DDP of the same model; or, of `by_stages`, by the same layout of so many."""

    model: str
    layout: str
    stages: int
    figure: str
    ratio: float
    by_stages: int | None = None


@functools.cache
def study() -> dict[str, Any]:
    """The file: source, title, machine, note, figures."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def published(model: str, layout: str, stages: int, figure: str) -> float | None:
    """By DDP; None where it is not known as a number."""
    for one in ratios(study()["figures"]):
        if (one.model, one.layout, one.stages, one.figure, one.by_stages) == (model, layout, stages, figure, None):
            return one.ratio
    return 1.0 if layout == BASE and any(entry["model"] == model for entry in study()["figures"]) else None


def ratios(figures: Sequence[dict[str, Any]]) -> list[Published]:
    """Of all figures that have something to be compared with."""
    found = []
    for one in figures:
        model, layout, stages = one["model"], one["layout"], _stages(one)
        same = [other for other in figures if other["model"] == model]
        if throughput := one.get("throughput_to_ddp"):
            found.append(Published(model, layout, stages, THROUGHPUT, throughput))
        base = next((other for other in same if other["layout"] == BASE), {})
        held, by = one.get("average_memory_gb"), base.get("average_memory_gb")
        if held and by and one is not base:
            found.append(Published(model, layout, stages, AVERAGE_MEMORY, held / by))
        fewest = min((other for other in same if other["layout"] == layout), key=_stages)
        rate, by = one.get("samples_per_second"), fewest.get("samples_per_second")
        if rate and by and one is not fewest:
            found.append(Published(model, layout, stages, THROUGHPUT, rate / by, _stages(fewest)))
    return found


def _stages(entry: dict[str, Any]) -> int:
    return int(entry.get("pipeline_parallel_size", 1))
