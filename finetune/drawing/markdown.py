"""Text from anywhere in Markdown: as it is, whatever it holds."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from finetune.drawing.table import Table


def fenced(text: str) -> str:
    """A block of Markdown that shows `text` as it is, whatever fences it has itself."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def cell(text: Any) -> str:
    """One line that neither ends a table cell nor starts markup, nor moves the cursor of who reads it by `cat`."""
    line = "".join(letter for letter in " ".join(str(text).split()) if unicodedata.category(letter) != "Cc")
    for character in "\\|<>`*_[]#!":
        line = line.replace(character, "\\" + character)
    return line


def table_markdown(table: Table) -> str:
    """With the alignment of the page: texts to the left, numbers to the right."""
    texts = {table.columns[0], *table.texts}
    lines = [[name.replace("\n", " ") for name in table.columns], *table.rows]
    rows = ["| " + " | ".join(map(cell, row)) + " |" for row in lines]
    rows.insert(1, "|" + "|".join("---" if name in texts else "---:" for name in table.columns) + "|")
    return "\n".join(rows)
