"""Published figures to compare with ours, as ratios: machines differ, but relative costs of layouts are comparable."""

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
    """A layout's `figure` relative to DDP of the same model or, with `by_stages`, to the same layout with so many
    stages."""

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
    """The ratio to DDP; None if it was not published as a number."""
    for one in ratios(study()["figures"]):
        if (one.model, one.layout, one.stages, one.figure, one.by_stages) == (model, layout, stages, figure, None):
            return one.ratio
    return 1.0 if layout == BASE and any(entry["model"] == model for entry in study()["figures"]) else None


def ratios(figures: Sequence[dict[str, Any]]) -> list[Published]:
    """The ratios of all figures that have a base to compare with."""
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
