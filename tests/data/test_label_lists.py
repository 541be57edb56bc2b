"""Rows with several labels, in the three forms in which they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from finetune.data.columns import MULTI_LABEL, Labels
from finetune.data.label_lists import strata
from finetune.data.tables import CleanTables, clean_tables
from finetune.errors import RequestError
from finetune.run.flags.text import DataArguments, PreparationArguments

NAMES = ("art", "law", "war")
GIVEN = [["art"], ["law", "art"], [], ["war"]] * 5
HOT = [[float(name in row) for name in NAMES] for row in GIVEN]


def table(rows: list[Any], column: str = "labels", feature: Any = None) -> Dataset:
    content = {"text": [f"some text {i}" for i in range(len(rows))], column: rows}
    return Dataset.from_dict(content, Features({"text": Value("string"), column: feature}) if feature else None)


def clean(tables: dict[str, Dataset], trained: Labels | None = None, cut: Any = None, **flags: Any) -> CleanTables:
    return clean_tables(tables, DataArguments(**flags), cut or PreparationArguments(), 0, None, trained)


def columns(cells: dict[str, list[Any]]) -> Dataset:
    rows = len(next(iter(cells.values())))
    return Dataset.from_dict({"text": [f"some text {i}" for i in range(rows)], **cells})


def of_names() -> tuple[Dataset, dict[str, Any]]:
    return table(GIVEN), {}


def of_ids() -> tuple[Dataset, dict[str, Any]]:
    ids = [[NAMES.index(name) for name in row] for row in GIVEN]
    return table(ids, feature=List(ClassLabel(names=list(NAMES)))), {}


def of_columns() -> tuple[Dataset, dict[str, Any]]:
    cells = {name: [str(int(row[i])) for row in HOT] for i, name in enumerate(NAMES)}
    return columns(cells), {"label_column_names": list(NAMES)}


def as_text(write: Callable[[list[Any]], str], rows: list[Any]) -> tuple[Dataset, dict[str, Any]]:
    return table([write(row) for row in rows]), {}


def numpy_text(row: list[Any]) -> str:
    return str(np.array(row))


FORMS = {
    "names": of_names,
    "ids": of_ids,
    "columns": of_columns,
    "pandas": lambda: as_text(str, GIVEN),
    "numpy": lambda: as_text(numpy_text, GIVEN),
    "json": lambda: as_text(json.dumps, GIVEN),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_every_form_gives_the_same_rows_of_zeros_and_ones(form: Any) -> None:
    given, flags = form()
    found = clean({"train": given, "validation": given}, **flags)
    assert found.labels == Labels(MULTI_LABEL, NAMES)
    assert found.splits["train"]["label"][:] == HOT
    assert found.splits["validation"]["label"][:] == HOT


@pytest.mark.parametrize("kind", [int, bool, float])
def test_a_list_of_zeros_and_ones_is_multi_hot_and_a_trained_model_names_its_places(kind: Any) -> None:
    given = table([[kind(value) for value in row] for row in HOT])
    assert clean({"train": given}).labels.names == ("label_0", "label_1", "label_2")
    trained = Labels(MULTI_LABEL, NAMES)
    found = clean({"train": given, "validation": given}, trained)
    assert found.labels == trained
    assert found.splits["validation"]["label"][:] == HOT


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param([[0, 1], [1, 0], [1]], r"training? data, row 3: has 1 values, but .* row 1 has 2", id="lengths"),
        pytest.param(
            [[0, 1], [1, 3]], r"row 2: has the value 3, .* holds only 0 and 1.* only from a ClassLabel", id="ids"
        ),
        pytest.param([[0, 1], [0, 1]], r"no training row has label_0, of 2 labels", id="never positive"),
        pytest.param([["art"], ["art", " "]], r"row 2: has an empty name", id="empty name"),
        pytest.param([[], []], r"no training row has a label", id="no label at all"),
    ],
)
def test_lists_that_are_no_labels_are_refused(rows: list[Any], said: str) -> None:
    feature = List(Value("string")) if rows == [[], []] else None
    with pytest.raises(RequestError, match=said.replace("training? data", "train data")):
        clean({"train": table(rows * 3 if "row" not in said else rows, feature=feature)})


@pytest.mark.parametrize(
    ("cells", "flags", "said"),
    [
        pytest.param({"a": ["1", "2"], "b": ["0", "1"]}, {}, r"train data, row 2, column a: is '2'", id="a two"),
        pytest.param(
            {"a": ["1", "0"], "b": ["0", "0"]}, {}, r"no training row has b, of 2 labels", id="never positive"
        ),
        pytest.param({"a": ["1", "0"]}, {}, r"the train data has no column 'b'", id="missing"),
    ],
)
def test_columns_that_are_no_labels_are_refused(cells: Any, flags: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        clean({"train": columns(cells)}, label_column_names=["a", "b"], **flags)


def ids(rows: list[Any]) -> Dataset:
    return table(rows, feature=List(ClassLabel(names=list(NAMES))))


def test_ids_that_a_test_set_hides_are_no_labels() -> None:
    given = ids([[0], [1, 0], [2]] * 5)
    found = clean({"train": given, "validation": given, "test": ids([[-1], [-1]])})
    assert "label" not in found.splits["test"].column_names
    with pytest.raises(RequestError, match="the validation data has 1 of 2 rows with empty text or label"):
        clean({"train": given, "validation": ids([[0], [-1, 0]])})


@pytest.mark.parametrize(
    ("rows", "feature", "said"),
    [
        pytest.param([[0], [0, -2]], List(ClassLabel(names=["a", "b"])), r"row 2: has the id -2, but the 2", id="low"),
        pytest.param([[None, 0]], List(ClassLabel(names=["a", "b"])), r"row 1: has an empty name", id="none"),
        pytest.param([[["a"]], [["b"]]], None, r"hold lists or objects, such as \['a'\], .*ClassLabel", id="nested"),
        pytest.param([[{"name": "a"}]], None, r"hold lists or objects, such as \{'name': 'a'\}", id="objects"),
    ],
)
def test_items_that_are_no_names_are_refused(rows: list[Any], feature: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        clean({"train": table(rows, feature=feature)})


def test_a_name_that_is_no_label_is_refused() -> None:
    with pytest.raises(RequestError, match=r"the validation data has labels that are not in .*: 'peace' \(1 rows\)"):
        clean({"train": table(GIVEN), "validation": table([["art", "peace"]])})


def test_one_label_a_row_and_several_are_not_mixed() -> None:
    with pytest.raises(RequestError, match="holds one label per row, but the task is multi_label"):
        clean({"train": table(["art", "law"])}, task=MULTI_LABEL)
    with pytest.raises(RequestError, match="the train data has lists in 'labels', but the validation data has one"):
        clean({"train": table(GIVEN), "validation": table(["art"])})
    with pytest.raises(RequestError, match="--task classification: the column 'labels' holds lists"):
        clean({"train": table(GIVEN)}, task="classification")


def test_a_row_without_a_list_is_bad_and_one_with_an_empty_list_is_not() -> None:
    given = table([*GIVEN, None])
    with pytest.raises(RequestError, match="has 1 of 21 rows with empty text or label"):
        clean({"train": given})
    found = clean({"train": given}, cut=PreparationArguments(skip_bad_rows=True))
    assert found.skipped["train"] == 1


def test_every_label_is_held_out_in_its_share() -> None:
    """Of labels from one in two rows to one in fifty; a row may have all of them."""
    random = np.random.default_rng(0)
    rows = (random.random((1000, 4)) < [0.5, 0.2, 0.1, 0.02]).astype(int)
    lists = [[f"l{i}" for i in np.flatnonzero(row)] for row in rows]
    found = clean({"train": table(lists)}, cut=PreparationArguments(validation_fraction=0.2))
    held_out = np.sum(found.splits["validation"]["label"][:], axis=0)
    assert held_out / rows.sum(axis=0) == pytest.approx([0.2] * 4, abs=0.06)
    assert strata(np.array([[1, 0], [1, 1], [0, 0]])).tolist() == [0, 1, 2]
