"""Lists that a csv holds as text, as pandas, numpy, Postgres or json write them: ['a', 'b'], ['a' 'b'], ("a", "b"),
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
LISTS = ("array", "list", "tuple", "set", "frozenset", "tensor", "deque", "Index")  # calls that make one
WHOLE = re.compile(r"[+-]?\d+")
CLOSED_BY = {"[": "]", "(": ")", "{": "}"}
BOOLS = {"True": "1", "true": "1", "False": "0", "false": "0"}
NOTHING = ("None", "null", "NULL", "nan", "NaN")
CUT = "..."  # numpy leaves out the middle of a long array
ODD: list[Any] = []  # stands for an item that is a list or an object
MOST_WHOLE = 2**53  # beyond, a float is no whole number for sure
SHOWN_CHARACTERS = 60
JOINTS, JOINED_SHARE = "|;", 0.1  # of the rows: from there on, labels may be several in one cell


class _NoListError(Exception):
    pass


class _Quoted(str):
    """A word that stood in quotes: 'true' and '3.10' are names there."""

    __slots__ = ()


class _Opened:
    """A bracket, and what has been read in it."""

    def __init__(self, bracket: str = "", call: str | None = None) -> None:
        self.bracket, self.call = bracket, call
        self.items: list[Any] = []
        self.options: int | None = None  # of a call, such as dtype=int64: behind how many items they begin
        self.commas, self.has_words = 0, False  # words: neither quoted nor numbers

    def add(self, kind: str, text: str) -> None:
        if kind == "comma":
            self.commas += 1
        elif kind == "quoted":
            self.items.append(_Quoted(_unquoted(text)))
        elif self.call and "=" in text:
            self.options = len(self.items) if self.options is None else self.options
        elif self.bracket == "{" and ":" in (text[0], text[-1]):  # Postgres quotes no colon: {10:30}
            self.items.append(ODD)
        else:
            self.has_words |= not (NUMBER.fullmatch(text) or text in (*NOTHING, *BOOLS, CUT))
            self.items.append(None if text in NOTHING else text)

    def value(self) -> Any:
        """What it holds. Raises _NoListError for words in brackets that are no list."""
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
    """Its items, each a text, None, or a list where it is no plain value; None for a text that is no list. Python's own
    reader would join 'art' 'law' to one."""
    try:
        found = _read(text.strip())
    except (_NoListError, SyntaxError, ValueError):  # as of a line break within quotes
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
    """By json's escapes, or Python's."""
    try:
        return str(json.loads(item))
    except ValueError:
        return str(ast.literal_eval(item))


def are_lists(cells: Iterable[object]) -> bool:
    """Whether some of a column's texts are lists beyond doubt."""
    return _first_list(cells) is not None


def _first_list(cells: Iterable[object]) -> tuple[str, list[Any]] | None:
    """A single word in brackets, [UNK], is a word."""
    ending = tuple(CLOSED_BY.values())
    lists = ((cell, list_in_text(cell)) for cell in cells if isinstance(cell, str) and cell.rstrip().endswith(ending))
    sure = ((cell, row) for cell, row in lists if row is not None and row != [cell.strip()[1:-1].strip()])
    return next(sure, None)


def _is_text(table: Dataset, column: str) -> bool:
    return column in table.column_names and table.features[column] in (Value("string"), Value("large_string"))


def note_of_lists(table: Dataset, column: str) -> str:
    """What to say of a column whose texts `lists_of_text` makes lists; nothing of any other."""
    found = _first_list(table[column][:]) if _is_text(table, column) else None
    return f"{column} holds lists as text, such as {found[0][:SHOWN_CHARACTERS]!r}, and is read so" if found else ""


def note_of_joined(labels: Counter[Any], column: str) -> str:
    """What to say of classes such as a|b and b|c beside a few single names that recur in them: somebody may have joined
    a text's labels. `labels` are the column's values with their numbers."""
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
    """The table, with the column as lists if its texts are such; `said` names the table in errors. Raises RequestError
    where some rows hold lists and others do not, and for lists that hold more than plain values."""
    cells = table[column][:] if _is_text(table, column) else []
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
        return "numpy has left out its middle"
    is_odd = any(isinstance(item, list) for item in row or ())
    return "it holds lists or objects, or words without quotes and commas" if is_odd else ""


def _typed(lists: list[Any]) -> tuple[str, list[Any]]:
    """Numbers where all are such, True and False among them."""
    numbers = [_number(item) for row in lists for item in row or ()]
    if any(one is None or abs(one) >= MOST_WHOLE for one in numbers):
        return "string", lists
    is_whole = all(one is not None and one.is_integer() for one in numbers)
    each = map(int if is_whole else float, numbers)  # type: ignore[arg-type]
    found = [None if row is None else [next(each) for _ in row] for row in lists]
    return "int64" if is_whole else "float64", found


def _number(item: str | None) -> float | None:
    """None for a name, as all in quotes are but whole numbers."""
    if isinstance(item, _Quoted):
        return float(item) if WHOLE.fullmatch(item) else None
    text = BOOLS.get(item, item) if item is not None else ""
    return float(text) if NUMBER.fullmatch(text) else None
