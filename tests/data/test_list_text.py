"""Lists that a csv holds as text."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from datasets import Dataset, List, Value
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.list_text import list_in_text, lists_of_text, note_of_joined
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
        ("['art', {'law': 1}", None),
        ("('art', 'law')", ["art", "law"]),
        ("('art',)", ["art"]),
        ("(1, 0)", ["1", "0"]),
        ("(art, law)", ["art", "law"]),
        ("{'art', 'law'}", ["art", "law"]),
        ("frozenset({'art'})", ["art"]),
        ("set()", []),
        ("{art,law}", ["art", "law"]),  # Postgres
        ("array(['art', 'law'],\n      dtype='<U3')", ["art", "law"]),
        ("array([], dtype=float64)", []),
        ("tensor([1, 0])", ["1", "0"]),
        ("[np.str_('art=law'), np.int64(1)]", ["art=law", "1"]),
        ("[u'art', b'law']", ["art", "law"]),
        ("['well', '...']", ["well", "..."]),
        ("{at,10:30}", ["at", "10:30"]),
        ("[not relevant]", None),
        ("print()", None),
        ("train(lr=0.1)", None),
        ("(see below)", None),
        ("add(x, y)", None),
        ("(0, 10]", None),
        ("[art](law)", None),
        ("(it's fine, isn't it)", None),
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
        (["[True, False]", "(False, True)"], "int64", [[1, 0], [0, 1]]),
        (["[1.0e+00 0.0e+00]"], "int64", [[1, 0]]),
        (["[0.5, 1]"], "float64", [[0.5, 1.0]]),
        (["[123456789012345678901, 1]"], "string", [["123456789012345678901", "1"]]),
    ],
)
def test_a_column_of_lists_becomes_one(cells: list[str | None], kind: str, rows: list[Any]) -> None:
    found = lists_of_text(column(*cells), "labels", "the train data")
    assert found.features["labels"] == List(Value(kind))
    assert found["labels"][:] == rows


@pytest.mark.parametrize(
    "cells", [["[UNK]", "[CLS]"], ["a", "b"], ["a [b, c]", "d"], ["(x)", "f(x, y)"], ["a(" * 9_999]]
)
def test_words_stay_words(cells: list[str]) -> None:
    table = column(*cells)
    assert lists_of_text(table, "labels", "the train data") is table


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["['a', 'b']", "c"], "the train data: row 2 of 'labels' is 'c', but others hold lists"),
        (["['a' ... 'z']"], "row 1 of 'labels' .* numpy has left out the middle"),
        (["['a']", "[[1, 0], [2]]"], "row 2 of 'labels' .* holds lists or objects"),
        (["[[1]]"], "row 1 of 'labels' .* holds lists or objects"),
        (["array([[1, 0],\n       [0, 1]])"], "row 1 of 'labels' .* holds lists or objects"),
        (["{'a': 1}"], "row 1 of 'labels' .* holds lists or objects"),
        (["[('a', 1)]"], "row 1 of 'labels' .* holds lists or objects"),
        (["[Rock and Roll, Pop]"], "row 1 of 'labels' .* words without quotes and commas"),
        (["[" * 5_000 + "]" * 5_000], "row 1 of 'labels' .* holds lists or objects"),
    ],
)
def test_lists_that_are_not_whole_and_not_everywhere_are_refused(cells: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        lists_of_text(column(*cells), "labels", "the train data")


@pytest.mark.parametrize(
    ("cells", "kind", "lists"),
    [
        (["['true', 'a']", "['false']"], "string", [["true", "a"], ["false"]]),
        (["['3.10', '3.9']"], "string", [["3.10", "3.9"]]),
        (["['well', '...']", "['no', 'way']"], "string", [["well", "..."], ["no", "way"]]),
        (["['1', '0']", "['0', '1']"], "int64", [[1, 0], [0, 1]]),
        (["[True, False]", "[False, False]"], "int64", [[1, 0], [0, 0]]),
    ],
)
def test_quoted_words_are_names_but_for_whole_numbers(cells: list[str], kind: str, lists: list[list[Any]]) -> None:
    found = lists_of_text(Dataset.from_dict({"text": cells, "labels": cells}), "labels", "it")
    assert found.features["labels"] == List(Value(kind))
    assert found["labels"][:] == lists


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"a": 5, "b": 5, "c": 5, "a|b": 3, "b|c": 2}, r"'a\|b' is one class. If \| joins .* \(3 names in 5 classes\)"),
        ({"a;b": 5, "b; c": 5, "a;c": 5, "a;b;c": 1}, r'write them as a list, \["a", "b"\], for several'),
        ({"a|b": 5, "c|d": 5}, ""),  # as many names as before
        ({"a|b": 5, "c": 5}, ""),
        ({"sport|ball": 5, "sport|ski": 5, "news|local": 5}, ""),
        ({"a": 50, "b": 50, "c": 50, "a|b": 1, "b|c": 1}, ""),  # a slip here and there
        ({"a|": 5, "|a": 5, "a": 5}, ""),
        ({1: 5, 2: 5, None: 3}, ""),
        ({"yes": 5, "no": 5}, ""),
    ],
    ids=str,
)
def test_labels_that_somebody_may_have_joined_are_said(labels: dict[Any, int], said: str) -> None:
    found = note_of_joined(Counter(labels), "label")
    assert re.search(said, found) if said else found == ""
