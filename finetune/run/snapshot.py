"""The snapshot of transformers' training arguments, written by `benchmarks/make_trainer_flags.py`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("training_arguments.json")
REQUIRED = "required"  # stands in place of a default


@cache
def snapshot() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return found
