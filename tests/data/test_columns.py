"""Columns and labels are found where that is unambiguous, and asked for where it is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from finetune.data.columns import (
    Columns,
    Labels,
    find_labels,
    is_empty,
    label_text,
    note_of_numbers,
    said_counts,
)
from finetune.data.find_columns import find_columns
from finetune.errors import RequestError

FOUND = [
    pytest.param({"sentence": "a b", "label": 1}, (("sentence",), "label"), id="SST-2 on the hub"),
    pytest.param({"text": "a b", "label": 0}, (("text",), "label"), id="IMDB on the hub"),
    pytest.param({"review": "a b", "sentiment": "positive"}, (("review",), "sentiment"), id="IMDB from Kaggle"),
    pytest.param({"idx": "1", "sentence": "a b", "label": "0"}, (("sentence",), "label"), id="an index beside"),
    pytest.param({"premise": "a", "hypothesis": "b", "label": 0}, (("premise", "hypothesis"), "label"), id="a pair"),
    pytest.param({"Text": "a b", "Label": 0}, (("Text",), "Label"), id="capital letters"),
    pytest.param({"sentence1": "a", "sentence2": "b", "score": 3.8}, (("sentence1", "sentence2"), "score"), id="STS-B"),
]


@pytest.mark.parametrize(("row", "expected"), FOUND)
def test_columns_are_found_by_their_names(row: dict[str, Any], expected: tuple[tuple[str, ...], str]) -> None:
    assert find_columns([row] * 6, None, None, "data") == Columns(
        *expected, others=tuple(name for name in row if name not in (*expected[0], expected[1]))
    )


def test_columns_without_names_are_found_by_their_contents() -> None:
    rows = [{"column_1": f"some words {i}", "column_2": str(i % 2)} for i in range(20)]
    assert find_columns(rows, None, None, "data") == Columns(("column_1",), "column_2")


def test_what_is_not_clear_is_asked_for_with_the_columns_listed() -> None:
    rows = [{"title": f"the title {i}", "abstract": f"an abstract {i}", "label": i % 2} for i in range(9)]
    with pytest.raises(
        RequestError, match=r"which column is the text.*title \(such as 'the title 0'\).*--text_column_names"
    ):
        find_columns(rows, None, None, "data")
    assert find_columns(rows, ["abstract"], None, "data") == Columns(("abstract",), "label", ("title",))


def test_a_wrong_column_name_is_refused_with_the_columns_listed() -> None:
    with pytest.raises(RequestError, match=r"no column 'txet' \(--text_column_names\).*text.*label"):
        find_columns([{"text": "a", "label": 1}], ["txet"], None, "data")


LABELS = [
    pytest.param(["0", "1", "1"], "classification", ("0", "1"), id="digits as text"),
    pytest.param([10, 9, 2], "classification", ("2", "9", "10"), id="integers, in the order of numbers"),
    pytest.param(["pos", "neg"], "classification", ("neg", "pos"), id="words"),
    pytest.param([True, False], "classification", ("False", "True"), id="booleans"),
    pytest.param([3.5, 1.0], "regression", (), id="fractions"),
    pytest.param(["3.5", "1.0"], "regression", (), id="fractions as text"),
    pytest.param([1.0, 0.0, 1.0], "classification", ("0", "1"), id="integers beside a NaN, as pandas keeps them"),
    pytest.param(["1.0", "0.0"], "classification", ("0", "1"), id="integers beside a NaN, as pandas writes them"),
    pytest.param(["1.0", "0", "1"], "classification", ("0", "1"), id="both in one file"),
    pytest.param([5.0, 1.0, 2.0, 3.0, 4.0], "classification", ("1", "2", "3", "4", "5"), id="stars"),
    pytest.param([-1.0, 1.0, 0.0], "classification", ("-1", "0", "1"), id="signed"),
    pytest.param([float(i) for i in range(20)], "classification", tuple(map(str, range(20))), id="20 whole floats"),
    pytest.param([float(i) for i in range(21)], "regression", (), id="too many whole floats"),
    pytest.param(list(range(21)), "classification", tuple(map(str, range(21))), id="as many integers"),
    pytest.param([1.0, 2.0, "1.5e0"], "regression", (), id="one fraction among whole floats"),
]


@pytest.mark.parametrize(
    ("values", "task", "said"),
    [
        ([1.0, 2.0], None, "whole numbers, and so classes (--task regression"),
        (["1.0", "2"], None, "whole numbers, and so classes (--task regression"),
        ([1.5, 2.0], None, "numbers to predict (--task classification"),
        (range(30), None, "if its labels are amounts"),
        (["v1.0", "v2.0"], None, ""),
        ([1, 2], None, ""),
        ([1.0, 2.0], "classification", ""),
        ([1.0, 2.0], "regression", ""),
    ],
)
def test_what_numbers_are_taken_for_is_said_where_nobody_asked_for_it(
    values: list[Any], task: str | None, said: str
) -> None:
    note = note_of_numbers(list(values), find_labels(Counter(values), task, None, "data"), task)
    assert said in note
    assert bool(note) == bool(said)


def test_a_model_that_predicts_numbers_goes_on_to_do_so() -> None:
    trained = Labels("regression", ())
    assert find_labels(Counter([1.0, 2.0]), None, None, "data", trained).task == "regression"
    assert find_labels(Counter([1.0, 2.0]), "classification", None, "data", trained).names == ("1", "2")
    assert find_labels(Counter(["a", "b"]), None, None, "data", trained).names == ("a", "b")


def test_classes_called_as_pandas_writes_integers_are_found_again() -> None:
    trained = Labels("classification", ("1.0", "0.0"))
    assert find_labels(Counter(["0.0", "1"]), None, None, "data", trained) == trained
    assert [trained.encode(value) for value in (0, "0", "0.0", 1.0)] == [1, 1, 1, 0]
    assert Labels("classification", ("1", "1.0")).ids == {"1": 0, "1.0": 1}


def test_labels_are_said_with_their_rows_all_of_a_few_else_the_ends() -> None:
    assert said_counts({"pos": 1200, "neg": 3}) == "'neg' 3, 'pos' 1,200"
    assert "\x1b" not in said_counts({"a\x1b": 1})
    long = "a" * 100
    assert said_counts({f"{long}x": 10, f"{long}y": 3}).count("aaa' ") == 2, "each is counted, though they look alike"
    assert said_counts({name: number for number, name in enumerate("abcdef", 1)}) == "from 1 of 'a' to 6 of 'f'"


def test_columns_that_are_read_are_said_with_those_that_are_not() -> None:
    row = {"title": "a", "body": "b c", "category": "x"}
    assert find_columns([row] * 3, None, None, "data").describe() == (
        "reads body as text, category as label, not title"
    )
    pair = find_columns([{"sentence1": "a", "sentence2": "b", "label": 1}] * 3, None, None, "data")
    assert pair.describe() == "reads sentence1 + sentence2 as text, label as label"
    wide = Columns(("t",), None, tuple("abcdefg"))
    assert wide.describe() == "reads t as text, not a + b + c + d + e and 2 more"
    assert Columns(("t",), "merged").describe(["art", "law"]) == "reads t as text, art + law as label"


@pytest.mark.parametrize(("values", "task", "names"), LABELS)
def test_the_task_follows_the_labels(values: list[Any], task: str, names: tuple[str, ...]) -> None:
    labels = find_labels(Counter(values), None, None, "data")
    assert (labels.task, labels.names) == (task, names)
    if names:
        assert sorted({labels.encode(value) for value in values}) == list(range(len(names)))


def test_task_overrules_the_labels() -> None:
    assert find_labels(Counter([1.0, 2.0]), "classification", None, "data").names == ("1", "2")
    assert find_labels(Counter([1, 2]), "regression", None, "data").task == "regression"


def test_bad_labels_are_refused() -> None:
    with pytest.raises(RequestError, match=r"the label is 'x' in every row \(7\)"):
        find_labels(Counter(["x"] * 7), None, None, "data")
    with pytest.raises(RequestError, match="needs numbers as labels, but found high"):
        find_labels(Counter(["1.5", "high"]), "regression", None, "data")


def test_one_column_is_not_text_and_label() -> None:
    with pytest.raises(RequestError, match="cannot be text and label"):
        find_columns([{"text": "a", "stars": 1}], ["stars"], "stars", "data")


def test_text_and_label_that_are_exchanged_are_refused() -> None:
    rows = [{"text": f"some words {i}", "label": str(i % 2)} for i in range(8)]
    with pytest.raises(RequestError, match=r"'label' would be read as text, and 'text' as label. Swap them"):
        find_columns(rows, None, "text", "the training data")


def test_emptiness_and_names_of_values() -> None:
    assert [is_empty(v) for v in (None, "", " \t", float("nan"), "0", 0, "NA")] == [True] * 4 + [False] * 3
    assert {label_text(1), label_text(1.0), label_text("1"), label_text(" 1 ")} == {"1"}


def test_fractions_are_a_regression_whatever_classes_the_model_was_trained_on() -> None:
    trained = Labels("classification", ("neg", "pos"))
    assert find_labels(Counter([3.5, 1.0, 2.2]), None, None, "here", trained).task == "regression"
    assert find_labels(Counter(["pos", "neg"]), None, None, "here", trained) == trained
    assert find_labels(Counter(["pos", "neg"]), None, ["pos", "neg"], "here").names == ("pos", "neg")


def test_an_infinite_number_among_numbers_to_predict_is_refused_unless_they_are_said_to_be_classes() -> None:
    values = Counter(["0.5", "inf", "0.7", "1.3"])
    with pytest.raises(RequestError, match="here: the label 'inf' is not finite, but the others are numbers"):
        find_labels(values, None, None, "here")
    assert find_labels(values, "classification", None, "here").names == ("0.5", "0.7", "1.3", "inf")
    assert find_labels(Counter(["1", "2", "inf"]), None, None, "here").task == "classification"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a b", "art": "{}", "law": "{}"}, "--label_column_names art law"),
        ({"tokens": "['a']", "tags": "['O']"}, "words with a tag each are for recipes/token_cls.py"),
    ],
)
def test_tables_that_want_another_flag_or_recipe_are_told_so(row: dict[str, str], said: str) -> None:
    rows = [{name: value.format(i % 2) for name, value in row.items()} for i in range(8)]
    with pytest.raises(RequestError, match=said):
        find_columns(rows, None, None, "the training data")
