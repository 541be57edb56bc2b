"""What others measured on a GPU is planned: docs/results/plan_public.md has all of it."""

from __future__ import annotations

import json
from typing import Any

import plan_public
import pytest

PUBLIC = json.loads((plan_public.RESULTS / "plan_public.json").read_text())


@pytest.mark.parametrize("row", PUBLIC["t4"], ids=lambda row: "-".join(map(str, list(row.values())[:4])))
def test_an_allocators_peak_on_a_t4_is_planned_within_one_percent(row: dict[str, Any]) -> None:
    """Eager attention's, too: its softmax takes a tensor more in the backward pass on a GPU than on a CPU."""
    assert plan_public.on_t4(row, PUBLIC["models"][row["model"]]) == pytest.approx(row["mib"], rel=0.01)
