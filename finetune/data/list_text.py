"""Lists that a csv holds as text, as pandas, numpy or json write them: ['a', 'b'], ['a' 'b'], ["a", "b"]."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable

from datasets import Dataset, List, Value

from finetune.data.columns import is_empty
from finetune.errors import RequestError

ITEM = re.compile(r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,'"\[\]]+)\s*,?\s*""")
WHOLE = re.compile(r"([+-]?\d+)(\.0*)?")
NOTHING = ("None", "null", "nan", "NaN")
CUT = "..."  # numpy leaves out the middle of a long array
SHOWN_CHARACTERS = 60


def list_in_text(text: str) -> list[str | None] | None:
    """Its items; None for a text that is no list. Python's own reader would join 'art' 'law' to one."""
    text = text.strip()
    if len(text) < 2 or text[0] != "[" or text[-1] != "]":
        return None
    items: list[str | None] = []
    at, end = 1, len(text) - 1
    while at < end and (found := ITEM.match(text, at, end)):
        item, at = found[1], found.end()
        try:
            items.append(_unquoted(item) if item[0] in "'\"" else None if item in NOTHING else item)
        except (SyntaxError, ValueError):  # as of a line break within quotes
            return None
    return items if not text[at:end].strip() else None


def _unquoted(item: str) -> str:
    """By json's escapes, or Python's."""
    try:
        return str(json.loads(item))
    except ValueError:
        return str(ast.literal_eval(item))


def are_lists(cells: Iterable[object]) -> bool:
    """Whether some of a column's texts are lists beyond doubt. A single word in brackets, [UNK], is a word."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    lists = [(cell, list_in_text(cell)) for cell in texts]
    return any(row is not None and (len(row) != 1 or "'" in cell or '"' in cell) for cell, row in lists)


def lists_of_text(table: Dataset, column: str, said: str) -> Dataset:
    """The table, with the column as lists if its texts are such; `said` names the table in errors. Raises RequestError
    where some rows hold lists and others do not."""
    if column not in table.column_names or table.features[column] not in (Value("string"), Value("large_string")):
        return table
    cells = table[column][:]
    if not are_lists(cells):
        return table
    lists = [None if is_empty(cell) else list_in_text(cell) for cell in cells]
    for number, (cell, row) in enumerate(zip(cells, lists, strict=True), 1):
        if (row is None and not is_empty(cell)) or (row and CUT in row):
            why = "numpy has left out its middle" if row else "others hold lists"
            raise RequestError(
                f"{said}: row {number} of {column!r} is {cell[:SHOWN_CHARACTERS]!r}, but {why}. Write a whole list in "
                "each, as JSON does."
            )
    items = [item for row in lists for item in row or ()]
    if all(item is not None and WHOLE.fullmatch(item) for item in items):
        numbers = [None if row is None else [int(float(str(item))) for item in row] for row in lists]
        return table.remove_columns(column).add_column(column, numbers, feature=List(Value("int64")))
    return table.remove_columns(column).add_column(column, lists, feature=List(Value("string")))
