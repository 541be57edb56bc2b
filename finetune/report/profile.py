"""What `--profile` found, from profile/summary.json: a row a part, a column a rank."""

from __future__ import annotations

from typing import Any

from finetune.page.table import Table
from finetune.report.axes import as_number
from finetune.report.words import said

MOST_ROWS, MOST_COLUMNS = 40, 12


def profile_table(found: dict[str, Any]) -> list[Table]:
    """Tolerant: any list of objects in it becomes a table of what the objects hold."""
    tables = list[Table]()
    for name, value in found.items():
        rows = value if isinstance(value, list) else _named(value) if isinstance(value, dict) else []
        rows = [row for row in rows if isinstance(row, dict)][:MOST_ROWS]
        columns = list(dict.fromkeys(str(key) for row in rows for key in row))[:MOST_COLUMNS]
        if len(columns) > 1:
            cells = tuple(tuple(said(row.get(column)) for column in columns) for row in rows)
            texts = tuple(c for c in columns if not any(as_number(row.get(c)) is not None for row in rows))
            tables.append(Table(str(name).replace("_", " "), tuple(columns), cells, texts=texts))
    return tables


def _named(found: dict[str, Any]) -> list[dict[str, Any]]:
    """An object of objects, or of numbers, as rows."""
    if all(isinstance(value, dict) for value in found.values()):
        return [{"part": key, **value} for key, value in found.items()]
    return [{"part": key, "value": value} for key, value in found.items() if as_number(value) is not None]
