"""Rows with several labels each: converts lists of names, multi-hot lists, or columns of 0 and 1 to lists of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import ClassLabel, Dataset, LargeList, List, Value

from finetune.data.columns import MAX_SHOWN, MULTI_LABEL, Labels, is_empty, label_text, names_of_ids
from finetune.data.list_text import lists_of_text
from finetune.errors import RequestError

MERGED = "label_column_names"  # the column into which the flag's columns are merged
MEND = (
    "Give lists of names, lists of 0 and 1 of one length, or a column of 0 and 1 per label with --label_column_names; "
    "class ids are read only from a ClassLabel column, which names them."
)
ZEROS_AND_ONES = {"0": 0, "1": 1, "false": 0, "true": 1}

Table = dict[str, Dataset]


def merge_label_columns(tables: Table, arguments: Any) -> tuple[Table, Any]:
    """Merges the columns of --label_column_names into one column of name lists; returns the adapted arguments, too.
    Raises RequestError for a missing column, and for a cell that is neither 0 nor 1."""
    names = arguments.label_column_names
    if not names:
        return tables, arguments
    if len(set(names)) < len(names):
        raise RequestError(f"--label_column_names {' '.join(names)}: names a column twice. Name each once.")
    merged = {split: _merged(table, names, split) for split, table in tables.items()}
    return merged, replace(arguments, label_column_name=MERGED)


def _merged(table: Dataset, names: Sequence[str], split: str) -> Dataset:
    missing = [name for name in names if name not in table.column_names]
    if split == "test" and len(missing) == len(names):
        return table
    if missing:
        raise RequestError(
            f"the {split} data has no column {missing[0]!r} (--label_column_names). "
            f"It has: {', '.join(table.column_names)}."
        )
    columns = [
        [_zero_or_one(cell, f"{split} data, row {i + 1}, column {name}") for i, cell in enumerate(table[name])]
        for name in names
    ]
    rows = [None if None in row else [i for i, cell in enumerate(row) if cell] for row in zip(*columns, strict=True)]
    return table.remove_columns(list(names)).add_column(MERGED, rows, feature=List(ClassLabel(names=list(names))))


def _zero_or_one(cell: Any, where: str) -> int | None:
    if is_empty(cell):
        return None  # a bad row, refused or skipped later
    found = ZEROS_AND_ONES.get(label_text(cell).lower())
    if found is None:
        raise RequestError(f"{where}: is {str(cell)[:40]!r}, but a label column holds only 0 and 1. {MEND}")
    return found


def has_lists(table: Dataset, label: str | None) -> bool:
    """Whether each row has a list of labels."""
    return label in table.column_names and isinstance(table.features[label], List | LargeList)


def name_lists(
    tables: Table, label: str | None, task: str | None, trained: Labels | None
) -> tuple[Table, Sequence[str] | None]:
    """Converts list labels to lists of names and leaves others unchanged; also returns the names that the training data
    declares, even if unused. Raises RequestError for lists that are neither names nor multi-hot, and if `task` or a
    trained model that is only evaluated needs the other kind."""
    tables = {split: lists_of_text(table, str(label), f"the {split} data") for split, table in tables.items()}
    labelled = {
        split: table
        for split, table in tables.items()
        if label in table.column_names and table.features[label] != Value("null")
    }
    lists = [split for split, table in labelled.items() if has_lists(table, label)]
    wants_lists = task == MULTI_LABEL or ("train" not in tables and trained and trained.task == MULTI_LABEL)
    if labelled and not lists and wants_lists:
        raise RequestError(f"the column {label!r} holds one label per row, but the task is {MULTI_LABEL}. {MEND}")
    if not lists:
        return tables, None
    if task not in (None, MULTI_LABEL):
        raise RequestError(
            f"--task {task}: the column {label!r} holds lists. Use --task {MULTI_LABEL}, or leave it out."
        )
    if trained and trained.task != MULTI_LABEL and "train" not in tables:
        raise RequestError(
            f"the column {label!r} holds lists, but the model predicts one label per row. Use another model."
        )
    if other := sorted(set(labelled) - set(lists)):
        raise RequestError(f"the {lists[0]} data has lists in {label!r}, but the {other[0]} data has one value. {MEND}")
    hot = MultiHot(trained)
    named = {split: _named(labelled[split], str(label), split, hot) for split in lists}
    return {**tables, **{split: table for split, (table, _) in named.items()}}, named[lists[0]][1]


class MultiHot:
    """Lists of 0 and 1, one value per label, all of one length across all tables."""

    def __init__(self, trained: Labels | None) -> None:
        self.trained = trained
        self.width, self.first = 0, ""

    def names(self) -> Sequence[str]:
        """The names of a row's positions: a trained model's, or else numbered."""
        if self.trained and len(self.trained.names) == self.width:
            return self.trained.names
        return [f"label_{i}" for i in range(self.width)]

    def places(self, row: Sequence[Any] | None, where: str) -> list[int] | None:
        """The positions of a row's ones; None if `row` is None. Raises RequestError."""
        if row is None:
            return None
        if not self.first:
            self.width, self.first = len(row), where
        wrong = [value for value in row if value not in (0, 1)]
        if wrong:
            raise RequestError(f"{where}: has the value {wrong[0]}, but a list of numbers holds only 0 and 1. {MEND}")
        if len(row) != self.width:
            raise RequestError(
                f"{where}: has {len(row)} values, but {self.first} has {self.width}: a list of numbers holds a 0 or a "
                f"1 for every label. {MEND}"
            )
        return [i for i, value in enumerate(row) if value]


def _named(table: Dataset, label: str, split: str, hot: MultiHot) -> tuple[Dataset, Sequence[str] | None]:
    """A table with its lists as names, and the names that it declares."""
    inside, lists = table.features[label].feature, table[label][:]
    declared: Sequence[str] | None = None
    where = [f"{split} data, row {i + 1}" for i in range(len(lists))]
    if isinstance(inside, ClassLabel):
        declared = inside.names
        named = [names_of_ids(row, inside.names, place) for row, place in zip(lists, where, strict=True)]
    elif not isinstance(inside, Value):
        raise RequestError(
            f"the {split} data: the lists in {label!r} hold lists or objects, such as {_first_item(lists)}, instead of "
            f"names. {MEND}"
        )
    elif any(kind in inside.dtype for kind in ("int", "float", "bool")):
        places = [hot.places(row, place) for row, place in zip(lists, where, strict=True)]
        declared = names = hot.names()
        named = [None if row is None else [names[i] for i in row] for row in places]
    else:
        named = [row and ["" if is_empty(name) else label_text(name) for name in row] for row in lists]
    for row, place in zip(named, where, strict=True):
        if row and "" in row:
            raise RequestError(f"{place}: has an empty name among its labels. Remove it.")
    return table.remove_columns(label).add_column(label, named, feature=List(Value("string"))), declared


def _first_item(lists: Sequence[Sequence[Any] | None]) -> str:
    return str(next((item for row in lists for item in row or ()), None))[:40]


def find_many_labels(lists: Sequence[Sequence[str]], declared: Sequence[str] | None, trained: Labels | None) -> Labels:
    """The labels of the training rows (lists of names), in the order of a trained model, as declared, or sorted. Raises
    RequestError for a label that no row has."""
    counts = Counter(name for names in lists for name in names)
    if trained and counts and set(counts) <= set(trained.names):
        return Labels(MULTI_LABEL, trained.names)
    names = tuple(declared or sorted(counts))
    never = [name for name in names if not counts[name]]
    if never or not names:
        shown = ", ".join(never[:MAX_SHOWN])
        what = f"no training row has {shown}, of {len(names)} labels" if never else "no training row has a label"
        raise RequestError(
            f"{what}: there is nothing to learn from. Remove it from the data, or add rows that have it."
        )
    return Labels(MULTI_LABEL, names)


def multi_hot(lists: Sequence[Sequence[str]], labels: Labels) -> npt.NDArray[np.float32]:
    """Rows of 0.0 and 1.0 (rows, labels). Raises KeyError for an unknown name."""
    rows: npt.NDArray[np.float32] = np.zeros((len(lists), len(labels.names)), dtype=np.float32)
    for row, names in zip(rows, lists, strict=True):
        row[[labels.ids[name] for name in names]] = 1.0
    return rows


def strata(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For rows (rows, labels) of 0 and 1: the rarest label of each row, or the number of labels if a row has none.
    Splits are stratified by it; common labels then spread over both sides by themselves."""
    rarest_first = np.argsort(rows.sum(axis=0), kind="stable")
    found: npt.NDArray[np.int64] = np.where(
        rows.any(axis=1), rarest_first[np.argmax(rows[:, rarest_first] > 0, axis=1)], rows.shape[1]
    )
    return found
