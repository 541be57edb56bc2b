"""HTML's line breaks in texts, as reviews from web pages have them."""

from __future__ import annotations

import re
from typing import Any

from finetune.data.columns import Columns

BREAK = re.compile(r"</?br\b[^<>]*>", re.IGNORECASE)


def without_html_breaks(rows: Any, columns: Columns) -> Any:
    """The rows, a table or a stream, where each <br> of a text is a line break."""

    def clean(row: dict[str, Any]) -> dict[str, Any]:
        texts = {name: row[name] for name in columns.text}
        return {name: BREAK.sub("\n", text) if isinstance(text, str) else text for name, text in texts.items()}

    return rows.map(clean, features=rows.features)
