"""The content of a benchmark's folder: one row per repeat of a cell, as a JSON line in OUTPUT/results.jsonl, whose keys
docs/bench.md describes; and the grid, which shows what is left to run. Never imports torch."""

from __future__ import annotations

import json
import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from finetune.errors import RequestError
from finetune.measure.outcome import DONE
from finetune.report.text import as_number
from finetune.run.flat_yaml import read_flat_yaml
from finetune.safe_read import read_json_lines, read_json_object

RESULTS, RECORD, GRID = "results.jsonl", "grid.json", "grid.yaml"


@dataclass(frozen=True)
class Row:
    """Seconds, bytes and losses, unscaled. In `memory`, lists have an entry per rank, `by_kind` is rank 0's, and
    `measured_by` says what bytes mean. `memory` and `step_seconds` are empty for a cell that was not done."""

    cell: str
    model: str
    layout: str
    ds_config: str | None
    ds_config_sha256: str | None
    world_size: int
    pipeline_parallel_size: int
    micro_batch: int
    accumulation: int | None
    checkpoint_interval: int
    precision: str
    repeat: int
    status: str
    scale: float | None = None  # these four are None in rows of an earlier version
    model_sha256: str | None = None  # of its sizes
    global_batch: int | None = None
    steps: int | None = None
    reason: str | None = None
    step_seconds: list[float] = field(default_factory=list)
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    losses: list[float] = field(default_factory=list)
    parameters: int | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    planned: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    git_revision: str = ""
    started: str = ""
    seconds: float = 0.0
    log: str | None = None

    @property
    def is_done(self) -> bool:
        return self.status == DONE

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def peak_bytes(self) -> int:
        """The fullest rank's peak."""
        return int(max(self.memory["peak_bytes"]))


def append(folder: Path, row: Row) -> None:
    """Append a row, flushed to disk before this returns."""
    path = folder / RESULTS
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(place: Path) -> list[Row]:
    """The rows of `read_results`."""
    return read_results(place)[0]


def read_results(place: Path) -> tuple[list[Row], int]:
    """The rows in a benchmark's folder, or in the file itself, and how many lines were skipped as incomplete after a
    kill. Raises RequestError if there is no file, and for a line that is not a row."""
    path = place / RESULTS if place.is_dir() else place
    if place.is_dir() and not path.exists():
        raise RequestError(f"{place}: holds no benchmark (no {RESULTS}). Give the --output_dir of `finetune bench`.")
    contents, torn = read_json_lines(path, inside=path.parent if place.is_dir() else None)
    rows, known = [], set(Row.__dataclass_fields__)
    for number, content in contents:
        try:
            rows.append(checked(Row(**{name: value for name, value in content.items() if name in known})))
        except (TypeError, AttributeError, ValueError) as error:
            raise RequestError(f"{path}:{number}: is not a benchmark result ({error}).") from error
    return rows, torn


TYPES = {"str": str, "int": int, "float": int | float, "list": list, "dict": dict, "None": type(None)}


def checked(row: Row) -> Row:
    """`row`, unchanged. Raises ValueError if a value is not of its type, or if it is done but lacks measurements."""
    for one in fields(row):
        types = [TYPES[word.partition("[")[0]] for word in str(one.type).split(" | ")]
        if not any(isinstance(getattr(row, one.name), kind) for kind in types):
            raise ValueError(f"{one.name} is {getattr(row, one.name)!r}")
    if not row.is_done:
        return row
    figures: dict[str, Any] = {
        "step_seconds": row.step_seconds,
        "samples_per_second": [row.samples_per_second],
        "memory.peak_bytes": row.memory.get("peak_bytes"),
        "memory.average_bytes": row.memory.get("average_bytes"),
    }
    for name, values in figures.items():
        if not values or not isinstance(values, list) or None in map(as_number, values):
            raise ValueError(f"it is done, but {name} is {values!r}")
    if any(isinstance(loss, bool) or not isinstance(loss, int | float) for loss in row.losses):  # NaN is a loss
        raise ValueError(f"it is done, but losses is {row.losses!r}")
    if min(row.step_seconds) <= 0:
        raise ValueError(f"it is done, but step_seconds is {row.step_seconds!r}")
    return row


def by_cell(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The repeats of each cell; cells in order of first appearance."""
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    return cells


def left_to_run(folder: Path, rows: Sequence[Row]) -> tuple[int, int]:
    """How many launches of the folder's grid have no row, and how many there are; with as many repeats as first
    requested, or as any cell has."""
    record = _record(folder)
    repeats = max([record.get("repeats", 1), *(row.repeat + 1 for row in rows)])
    every = {(cell, repeat) for cell in record.get("cells", []) for repeat in range(repeats)}
    return len(every - {(row.cell, row.repeat) for row in rows}), len(every)


def command_to_go_on(folder: Path) -> str | None:
    """The command that continues, with the flags that override the YAML; None if the folder has no grid."""
    path, record = folder / GRID, _record(folder)
    if not path.is_file() or not record:
        return None
    words = ["finetune", "bench", str(path), "--output_dir", str(folder), "--resume"]
    content = read_flat_yaml(str(path), holds="a grid")
    for name, default in (("scale", 1.0), ("repeats", 1)):
        if record.get(name) not in (None, content.get(name, default)):
            words += [f"--{name}", str(record[name])]
    return shlex.join(words)


def _record(folder: Path) -> dict[str, Any]:
    """The grid as recorded in the folder; empty without a record."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    try:
        content = read_json_object(path, inside=folder)
        cells = [str(cell) for cell in content["cells"]]
        return {"scale": content["scale"], "repeats": int(content.get("repeats", 1)), "cells": cells}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RequestError(f"{path}: is not a benchmark's record ({error}). Delete the folder, or fix it.") from error
