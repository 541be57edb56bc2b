"""Results that were never run, for tests of what is done with them."""

from __future__ import annotations

from typing import Any

from finetune.bench.result import Row


def row(cell: str = "wide-ddp-2x8", repeat: int = 0, seconds: float = 0.1, **changes: Any) -> Row:
    """Done, by default, in steps of `seconds`."""
    model, layout, _ = cell.split("-", maxsplit=2)
    values: dict[str, Any] = {
        "cell": cell, "model": model, "layout": layout, "ds_config": None, "ds_config_sha256": None, "world_size": 2,
        "pipeline_parallel_size": 1, "micro_batch": 8, "accumulation": 1, "checkpoint_interval": 0,
        "precision": "fp32", "repeat": repeat, "status": "done", "step_seconds": [seconds * 0.9, seconds, seconds * 3],
        "samples_per_second": 16 / seconds, "losses": [2.5, 2.4], "parameters": 1000, "git_revision": "abc",
        "memory": {"peak_bytes": [2**20, 2**21], "average_bytes": [2**20, 2**20], "rss_peak_bytes": [2**28, 2**28],
                   "by_kind": {"parameters": 4000}, "measured_by": "bytes of tensors"},
        "started": "2026-01-02T03:04:05Z", "machine": {"processor": "P", "cores": 2, "gpus": []},
        "versions": {"torch": "2"}, **changes,
    }  # fmt: skip
    if values["status"] != "done":
        values |= {"step_seconds": [], "samples_per_second": None, "losses": [], "memory": {}}
    return Row(**values)
