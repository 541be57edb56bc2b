"""Lists stored as text in a CSV, as pandas, numpy, Postgres or json write them: ['a', 'b'], ['a' 'b'], ("a", "b"),
{a,b}, array(['a', 'b'], dtype=object), [np.str_('a')]."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from datasets import Dataset, List, Value

from finetune.data.columns import is_empty
from finetune.errors import RequestError
from finetune.run.flag import NUMBER

TOKEN = re.compile(
    r"""\s*(?:(?P<call>[A-Za-z_][\w.]*)?(?P<open>[\[({])|(?P<close>[])}])|(?P<comma>,)"""
    r"""|[bu]?(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<bare>[^][\s,'"(){}]+))\s*"""
)
LISTS = ("array", "list", "tuple", "set", "frozenset", "tensor", "deque", "Index")  # calls that build a list
WHOLE = re.compile(r"[+-]?\d+")
CLOSED_BY = {"[": "]", "(": ")", "{": "}"}
BOOLS = {"True": "1", "true": "1", "False": "0", "false": "0"}
NOTHING = ("None", "null", "NULL", "nan", "NaN")
CUT = "..."  # numpy leaves out the middle of a long array
ODD: list[Any] = []  # stands for an item that is a list or an object
MOST_WHOLE = 2**53  # from here on a float may be a rounded integer
SHOWN_CHARACTERS = 60
JOINTS, JOINED_SHARE = "|;", 0.1  # from this share of rows on, one cell probably joins several labels


class _NoListError(Exception):
    pass


class _Quoted(str):
    """A quoted word: in quotes, 'true' and '3.10' are names."""

    __slots__ = ()


class _Opened:
    """An open bracket and what has been read since."""

    def __init__(self, bracket: str = "", call: str | None = None) -> None:
        self.bracket, self.call = bracket, call
        self.items: list[Any] = []
        self.options: int | None = None  # number of items before a call's first option, such as dtype=int64
        self.commas, self.has_words = 0, False  # words: unquoted, and not numbers

    def add(self, kind: str, text: str) -> None:
        if kind == "comma":
            self.commas += 1
        elif kind == "quoted":
            self.items.append(_Quoted(_unquoted(text)))
        elif self.call and "=" in text:
            self.options = len(self.items) if self.options is None else self.options
        elif self.bracket == "{" and ":" in (text[0], text[-1]):  # Postgres does not quote colons: {10:30}
            self.items.append(ODD)
        else:
            self.has_words |= not (NUMBER.fullmatch(text) or text in (*NOTHING, *BOOLS, CUT))
            self.items.append(None if text in NOTHING else text)

    def value(self) -> Any:
        """The bracket's value. Raises _NoListError for bracketed text that is not a list."""
        if self.call:  # array([1, 0], dtype=int64), np.str_('a')
            inside = self.items[: self.options]
            if len(inside) > 1:
                raise _NoListError
            return inside[0] if inside else []
        is_apart = not self.has_words or self.commas >= len(self.items) - 1
        if not (is_apart or self.commas):
            raise _NoListError
        return self.items if is_apart else [ODD]


def list_in_text(text: str) -> list[Any] | None:
    """The items of a list: strings, None, or a list for anything that is not a plain value. None if `text` is not a
    list. ast.literal_eval will not do: it joins 'art' 'law' into one string."""
    try:
        found = _read(text.strip())
    except (_NoListError, SyntaxError, ValueError):  # such as a line break inside quotes
        return None
    return found if isinstance(found, list) else None


def _read(text: str) -> Any:
    at, opened = 0, [_Opened()]
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None or (at and len(opened) == 1):
            raise _NoListError
        at, kind = found.end(), str(found.lastgroup)
        if kind == "open":
            is_first = len(opened) == 1
            if (call := found["call"]) and (
                found["open"] != "(" or (is_first and call.rpartition(".")[2] not in LISTS)
            ):
                raise _NoListError
            opened.append(_Opened(found["open"], found["call"]))
        elif kind == "close":
            last = opened.pop()
            if not opened or CLOSED_BY[last.bracket] != found["close"]:
                raise _NoListError
            opened[-1].items.append(last.value())
        else:
            opened[-1].add(kind, found[kind])
    if len(opened) != 1 or len(opened[0].items) != 1:
        raise _NoListError
    return opened[0].items[0]


def _unquoted(item: str) -> str:
    """Decodes JSON escapes, or else Python's."""
    try:
        return str(json.loads(item))
    except ValueError:
        return str(ast.literal_eval(item))


def are_lists(cells: Iterable[object]) -> bool:
    """Whether any of the texts is certainly a list."""
    return _first_list(cells) is not None


def _first_list(cells: Iterable[object]) -> tuple[str, list[Any]] | None:
    """The first text that is certainly a list, and its items. A single bracketed word, such as [UNK], is not one."""
    ending = tuple(CLOSED_BY.values())
    lists = ((cell, list_in_text(cell)) for cell in cells if isinstance(cell, str) and cell.rstrip().endswith(ending))
    sure = ((cell, row) for cell, row in lists if row is not None and row != [cell.strip()[1:-1].strip()])
    return next(sure, None)


def is_text(table: Dataset, column: str) -> bool:
    """Whether the table has such a column, of texts."""
    return column in table.column_names and table.features[column] in (Value("string"), Value("large_string"))


def note_of_lists(table: Dataset, column: str) -> str:
    """A note on a text column that `lists_of_text` turns into lists; empty for any other column."""
    found = _first_list(table[column][:]) if is_text(table, column) else None
    return f"{column} holds lists as text, such as {found[0][:SHOWN_CHARACTERS]!r}; read as lists" if found else ""


def note_of_joined(labels: Counter[Any], column: str) -> str:
    """A warning if classes such as a|b and b|c are combinations of fewer single names: each cell may join several
    labels. `labels` maps the column's values to their counts."""
    for mark in JOINTS:
        parts = {label: [one.strip() for one in str(label).split(mark)] for label in labels if not is_empty(label)}
        joined = {label for label, names in parts.items() if len(names) > 1 and all(names)}
        names = {one for label in parts for one in parts[label]}
        if len(names) < len(parts) and sum(labels[one] for one in joined) >= JOINED_SHARE * labels.total():
            shown = str(min(joined, key=str))[:SHOWN_CHARACTERS]
            lists = json.dumps(shown.split(mark), ensure_ascii=False)
            return (
                f"{column}: {shown!r} is one class. If {mark} joins the labels of a text ({len(names):,} names in "
                f"{len(parts):,} classes), write them as a list, {lists}, for several labels a text"
            )
    return ""


def lists_of_text(table: Dataset, column: str, said: str) -> Dataset:
    """The table with its column of list texts turned into lists; unchanged if the texts are not lists. `said` names the
    table in errors. Raises RequestError if only some rows hold lists, or if a list holds more than plain values."""
    cells = table[column][:] if is_text(table, column) else []
    if not are_lists(cells):
        return table
    lists = [None if is_empty(cell) else list_in_text(cell) for cell in cells]
    for number, (cell, row) in enumerate(zip(cells, lists, strict=True), 1):
        if why := _fault(row) if row is not None or is_empty(cell) else "others hold lists":
            raise RequestError(
                f"{said}: row {number} of {column!r} is {cell[:SHOWN_CHARACTERS]!r}, but {why}. Write a whole list of "
                "plain values in each, as JSON does."
            )
    kind, lists = _typed(lists)
    return table.remove_columns(column).add_column(column, lists, feature=List(Value(kind)))


def _fault(row: list[Any] | None) -> str:
    if any(item == CUT and not isinstance(item, _Quoted) for item in row or ()):
        return "numpy has left out the middle"
    is_odd = any(isinstance(item, list) for item in row or ())
    return "it holds lists or objects, or words without quotes and commas" if is_odd else ""


def _typed(lists: list[Any]) -> tuple[str, list[Any]]:
    """Numbers if every item is a number or a boolean; otherwise strings."""
    numbers = [_number(item) for row in lists for item in row or ()]
    if any(one is None or abs(one) >= MOST_WHOLE for one in numbers):
        return "string", lists
    is_whole = all(one is not None and one.is_integer() for one in numbers)
    each = map(int if is_whole else float, numbers)  # type: ignore[arg-type]
    found = [None if row is None else [next(each) for _ in row] for row in lists]
    return "int64" if is_whole else "float64", found


def _number(item: str | None) -> float | None:
    """None for a name. A quoted item is a name unless it is an integer."""
    if isinstance(item, _Quoted):
        return float(item) if WHOLE.fullmatch(item) else None
    text = BOOLS.get(item, item) if item is not None else ""
    return float(text) if NUMBER.fullmatch(text) else None
