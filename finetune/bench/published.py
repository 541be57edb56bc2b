"""The published figures beside ours, as ratios to DDP: machines differ, and what a layout costs may be compared."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published.json")
BASE = "ddp"


@dataclass(frozen=True)
class Published:
    """By DDP of the same model; None where there is no number."""

    throughput: float | None = None
    average_memory: float | None = None


@functools.cache
def study() -> dict[str, Any]:
    """The file: source, title, machine, note, figures."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def published(model: str, layout: str, stages: int = 1) -> Published:
    """Of one layout of one model."""
    ours, base = _figures(model, layout, stages), _figures(model, BASE, 1)
    throughput = 1.0 if layout == BASE and base else ours.get("throughput_to_ddp")
    return Published(throughput, _by(ours, base, "average_memory_gb"))


def _figures(model: str, layout: str, stages: int) -> dict[str, Any]:
    for entry in study()["figures"]:
        if (entry["model"], entry["layout"], entry.get("pipeline_parallel_size", 1)) == (model, layout, stages):
            return dict(entry)
    return {}


def _by(one: dict[str, Any], base: dict[str, Any], name: str) -> float | None:
    return one[name] / base[name] if name in one and name in base else None
