"""Replaces HTML line breaks in texts, as found in reviews from web pages."""

from __future__ import annotations

import re
from typing import Any

from finetune.data.columns import Columns

BREAK = re.compile(r"</?br\b[^<>]*>", re.IGNORECASE)


def without_html_breaks(rows: Any, columns: Columns) -> Any:
    """Replaces each <br> in the texts of a table or stream with a newline."""

    def clean(row: dict[str, Any]) -> dict[str, Any]:
        texts = {name: row[name] for name in columns.text}
        return {name: BREAK.sub("\n", text) if isinstance(text, str) else text for name, text in texts.items()}

    return rows.map(clean, features=rows.features)
