"""How values of any file are said in a cell."""

from __future__ import annotations

import json
from typing import Any

from finetune.drawing.words import number
from finetune.report.axes import as_number

LONGEST = 160  # letters of a cell


def said(value: Any) -> str:
    """Short; "" for what is not there."""
    if value is None:
        return ""
    found = as_number(value)
    if found is not None and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else number(found)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def ratio(value: float | None, of: float | None) -> str:
    return f"{value / of:.2f}x" if value is not None and of else ""


def figure(value: float | None) -> str:
    return "" if value is None else number(value)
