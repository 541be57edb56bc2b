"""What a bench's folder says of what is left to run. Never imports torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.bench.result import Row
from finetune.bench.runner import RECORD
from finetune.errors import RequestError
from finetune.run.flat_yaml import read_flat_yaml
from finetune.safe_read import read_json_object

GRID = "grid.yaml"


def left_to_run(folder: Path, rows: Sequence[Row]) -> tuple[int, int]:
    """How many launches of the folder's grid have no row, and of how many; of as many repeats as were asked for first,
    or as any cell has."""
    record = _record(folder)
    repeats = max([record.get("repeats", 1), *(row.repeat + 1 for row in rows)])
    every = {(cell, repeat) for cell in record.get("cells", []) for repeat in range(repeats)}
    return len(every - {(row.cell, row.repeat) for row in rows}), len(every)


def command_to_go_on(folder: Path) -> str | None:
    """With the flags that overruled the YAML; None where the folder has no grid."""
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
    """What was made of the grid; nothing where it is not there."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    try:
        content = read_json_object(path, inside=folder)
        return {"scale": content["scale"], "repeats": int(content.get("repeats", 1)), "cells": list(content["cells"])}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RequestError(f"{path}: is no record of a bench ({error}). Delete the folder, or mend it.") from error
