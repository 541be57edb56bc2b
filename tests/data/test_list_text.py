"""Lists that a csv holds as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Dataset, List, Value
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.list_text import list_in_text, lists_of_text
from finetune.errors import RequestError

LISTS = st.lists(st.text(st.characters(codec="utf-8")))


@pytest.mark.parametrize("write", [str, json.dumps, lambda row: json.dumps(row, ensure_ascii=False)])
@given(row=LISTS)
def test_what_python_and_json_write_is_read_back(write: Any, row: list[str]) -> None:
    assert list_in_text(write(row)) == row


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("['art' 'law']", ["art", "law"]),  # numpy's; Python reads 'artlaw'
        ("['art'\n 'law']", ["art", "law"]),
        (" [art, law] ", ["art", "law"]),
        ("[1 0 1]", ["1", "0", "1"]),
        ("[1. 0.]", ["1.", "0."]),
        ("['art', None]", ["art", None]),
        ("[]", []),
        ("art", None),
        ("[art", None),
        ("[['art'], ['law']]", None),
        ("['art', {'law': 1}", None),
        ("['open]", None),
        ("", None),
    ],
)
def test_items_are_read_with_quotes_and_without(text: str, items: list[str | None] | None) -> None:
    assert list_in_text(text) == items


def column(*cells: str | None) -> Dataset:
    return Dataset.from_dict({"text": ["some text"] * len(cells), "labels": list(cells)})


@pytest.mark.parametrize(
    ("cells", "kind", "rows"),
    [
        (["['a', 'b']", None, "[]"], "string", [["a", "b"], None, []]),
        (["[1, 0]", "[0. 1.]"], "int64", [[1, 0], [0, 1]]),
        (["[1, 0]", "[None]"], "string", [["1", "0"], [None]]),
    ],
)
def test_a_column_of_lists_becomes_one(cells: list[str | None], kind: str, rows: list[Any]) -> None:
    found = lists_of_text(column(*cells), "labels", "the train data")
    assert found.features["labels"] == List(Value(kind))
    assert found["labels"][:] == rows


@pytest.mark.parametrize("cells", [["[UNK]", "[CLS]"], ["a", "b"], ["a [b, c]", "d"]])
def test_words_stay_words(cells: list[str]) -> None:
    table = column(*cells)
    assert lists_of_text(table, "labels", "the train data") is table


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["['a', 'b']", "c"], "the train data: row 2 of 'labels' is 'c', but others hold lists"),
        (["['a' ... 'z']"], "row 1 of 'labels' .* numpy has left out its middle"),
    ],
)
def test_lists_that_are_not_whole_and_not_everywhere_are_refused(cells: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        lists_of_text(column(*cells), "labels", "the train data")
