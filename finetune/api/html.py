"""How a notebook shows a result: escaped lines and tables, without styles, scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from finetune.report.svg import escaped
from finetune.report.table import Table


def block(title: str, lines: Iterable[str] = (), *parts: str) -> str:
    """A heading, paragraphs, and `parts` that are already HTML."""
    words = "".join(f"<p>{escaped(line)}</p>" for line in lines)
    return f"<div><p><strong>{escaped(title)}</strong></p>{words}{''.join(parts)}</div>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return (
        f"<table><thead>{_row('th', columns)}</thead><tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"
    )


def table_of(found: Table, most_rows: int | None = None) -> str:
    return f"<p>{escaped(found.title)}</p>{table(found.columns, found.rows[:most_rows])}"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escaped(cell)}</{tag}>' for cell in cells)}</tr>"
