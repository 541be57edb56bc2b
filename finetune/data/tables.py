"""Cleans raw tables: loads splits, finds columns and labels, refuses or skips bad rows, chooses samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from datasets import ClassLabel, Dataset, LargeList, List

from finetune.data.builtin import docstring_rows
from finetune.data.columns import (
    MULTI_LABEL,
    Columns,
    Labels,
    find_labels,
    is_empty,
    label_text,
    names_of_ids,
    note_of_numbers,
    without_html_breaks,
)
from finetune.data.files import open_file
from finetune.data.find_columns import HEAD_ROWS, find_columns, trained_on
from finetune.data.label_lists import find_many_labels, has_lists, merge_label_columns, multi_hot, name_lists, strata
from finetune.data.list_text import note_of_joined, note_of_lists
from finetune.data.odd_labels import countable, missing_labels, notes_of_names, refuse_nested, said_missing
from finetune.data.splits import HeldOut, open_splits, refuse_bad_rows, said_split, unused_fraction
from finetune.errors import RequestError
from finetune.run.flags.text import DataArguments, PreparationArguments

SPLITS = ("train", "validation", "test")
ROW = "row"  # the number of a test row in its file, from 0

Table = dict[str, Dataset]
Rows = TypeVar("Rows", bound=Sized)


def load_tables(arguments: DataArguments) -> tuple[Table, str]:
    """The raw splits given, and a line that says where they come from. Raises RequestError."""
    bare = dict[str, bool]()

    def opened(split: str, name: str) -> Dataset:
        # A test file with a single text column cannot reveal that it has no header; the training file can.
        header = False if bare.get("train") else None
        table = open_file(f"{split}_file", name, False, header, arguments.encoding)
        bare[split] = table.column_names[0] == "column_1"
        return table

    source = "built-in docstrings of Python's standard library, labelled with their package"
    splits = SPLITS[1:] if arguments.streaming else SPLITS
    return open_splits(arguments, lambda: {"train": Dataset.from_dict(docstring_rows())}, source, opened, splits)


@dataclass(frozen=True)
class CleanTables:
    """Splits with the text columns and, if labeled, `label` with ids or numbers."""

    splits: Table
    columns: Columns
    labels: Labels
    skipped: dict[str, int]
    notes: tuple[str, ...] = ()


def clean_tables(
    tables: Table,
    arguments: DataArguments,
    cut: PreparationArguments,
    seed: int,
    known: tuple[Columns, Labels] | None = None,
    trained: Labels | None = None,
) -> CleanTables:
    """Finds columns and labels, refuses or skips bad rows, splits and cuts. Raises RequestError before any heavy work.

    `known` are the columns and labels of a streamed training set, which is not among the tables. `trained` are a
    trained model's labels: they keep their ids, and define the classes if there is no training set."""
    tables, arguments = merge_label_columns(tables, arguments)
    known = known or (None if "train" in tables else _known_without_training(tables, arguments, trained))
    columns = known[0] if known else _columns_of(tables["train"], arguments)
    notes = [note_of_lists(table, str(columns.label)) for table in islice(tables.values(), 1)]
    tables, names = name_lists(tables, columns.label, arguments.task, trained)
    if known is None and names is None:
        names = _class_names(tables["train"], columns.label)
    skipped, cleaned = dict[str, int](), Table()
    single = {} if names else _single_labels(tables, columns.label, arguments)
    missing = missing_labels(single, known[1] if known else trained)
    for split, table in tables.items():
        kept = _only_needed_columns(table, columns, split)
        kept = without_html_breaks(kept, columns) if arguments.clean_line_breaks else kept
        words = missing.get(split, ())
        cleaned[split], skipped[split] = _without_bad_rows(kept, columns, split, cut.skip_bad_rows, words)
    if known is None:
        values = cleaned["train"][columns.label][:]
        if has_lists(cleaned["train"], columns.label):
            labels = find_many_labels(values, names, trained)
        else:
            labels, said = _counted_labels(values, arguments.task, str(columns.label), names, trained)
            notes += said
        notes += [] if names else notes_of_names(labels.names, str(columns.label))
    else:
        labels = known[1]
    for split, table in cleaned.items():
        cleaned[split] = _encode(table, columns, labels, split)
    cleaned, note = settle_splits(
        cleaned, cut, seed, lambda train: _held_out(train, labels, cut.validation_fraction, seed)
    )
    return CleanTables(cleaned, columns, labels, skipped, tuple(filter(None, (*notes, note))))


def _counted_labels(values: Any, task: Any, column: str, names: Any, trained: Any) -> tuple[Labels, list[str]]:
    """The labels of single-label rows, and notes about them."""
    counts = Counter(map(countable, values))
    labels = find_labels(counts, task, names, "the training data", trained)
    return labels, [note_of_numbers(set(counts), labels, task), "" if names else note_of_joined(counts, column)]


def _single_labels(tables: Table, label: str | None, arguments: DataArguments) -> dict[str, list[Any]]:
    """The raw labels of each single-label split. Raises RequestError for a list or an object among them."""
    found = {
        split: table[label][:]
        for split, table in tables.items()
        if label in table.column_names and not isinstance(table.features[label], ClassLabel | List | LargeList)
    }
    for split, values in found.items():
        refuse_nested(values, str(label), said_split(arguments, split))
    return found


def _known_without_training(tables: Table, arguments: DataArguments, trained: Labels | None) -> tuple[Columns, Labels]:
    """Columns and labels if nothing is trained. Raises RequestError without a trained model that defines the labels."""
    if trained is None:
        raise RequestError(
            "there is no training data to learn the labels from. Give --train_file. To evaluate or predict only, give "
            "--do_train False and --model_name_or_path with a model whose config.json names its labels."
        )
    split = "validation" if "validation" in tables else "test"
    texts = arguments.text_column_names or trained_on(trained.columns, tables[split].column_names, f"the {split} data")
    return _columns_of(tables[split], replace(arguments, text_column_names=texts), split, split != "test"), trained


def _columns_of(table: Dataset, arguments: DataArguments, split: str = "training", needs_label: bool = True) -> Columns:
    head = table.select(range(min(HEAD_ROWS, len(table)))).to_list()
    text, label = arguments.text_column_names, arguments.label_column_name
    return find_columns(head, text, label, f"the {split} data", needs_label)


def _class_names(table: Dataset, label: str | None) -> list[str] | None:
    feature = table.features.get(label)
    return list(feature.names) if isinstance(feature, ClassLabel) else None


def _only_needed_columns(table: Dataset, columns: Columns, split: str) -> Dataset:
    """Keeps the columns used. A test split may lack the label; other splits must have them all."""
    missing = [name for name in columns.text if name not in table.column_names]
    if columns.label not in table.column_names and split != "test":
        missing.append(str(columns.label))
    if missing:
        raise RequestError(
            f"the {split} data has no column {missing[0]!r}, which the training data has. "
            f"It has: {', '.join(table.column_names)}."
        )
    wanted = [*columns.text, *([columns.label] if columns.label in table.column_names else [])]
    table = table.select_columns(wanted)
    if split == "test":
        table = table.add_column(ROW, list(range(len(table))))  # links a prediction to its row
    if columns.label in wanted and isinstance(table.features[columns.label], ClassLabel):
        names = table.features[columns.label].names
        rows = [names_of_ids([v], names, f"{split} data, row {i + 1}") for i, v in enumerate(table[columns.label])]
        values = [row[0] or None if row else None for row in rows]
        table = table.remove_columns(columns.label).add_column(columns.label, values)
    return table


def _without_bad_rows(
    table: Dataset, columns: Columns, split: str, skip: bool, missing: Sequence[str] = ()
) -> tuple[Dataset, int]:
    """Refuses rows with empty text or label, or leaves them out with `skip`. Labels in `missing` count as empty. A test
    split may have no labels at all."""
    bad: npt.NDArray[np.bool_] = np.zeros(len(table), dtype=bool)
    for name in table.column_names:
        none = missing if name == columns.label else ()
        found = (is_empty(value) or label_text(value) in none for value in table[name])
        empty = np.fromiter(found, dtype=bool, count=len(table))
        if name == columns.label and split == "test" and empty.all():
            table = table.remove_columns(name)
            continue
        bad |= empty
    count = int(bad.sum())
    what, more = "rows with empty text or label", said_missing(missing)
    refuse_bad_rows(f"the {split} data", np.flatnonzero(bad).tolist(), len(table), what, skip, more)
    if count == len(table):
        raise RequestError(f"the {split} data has no row with both text and label. Check the column names.")
    return (table.select(np.flatnonzero(~bad)) if count else table), count


def _encode(table: Dataset, columns: Columns, labels: Labels, split: str) -> Dataset:
    if columns.label not in table.column_names:
        return table
    values = table[columns.label][:]
    if labels.task == "regression":
        ids: list[Any] = [_as_number(value, split) for value in values]
    else:
        lists = values if labels.task == MULTI_LABEL else [[label_text(value)] for value in values]
        unknown = Counter(name for names in lists for name in names if name not in labels.ids)
        if unknown:
            shown = ", ".join(f"{name!r} ({count} rows)" for name, count in unknown.most_common(5))
            raise RequestError(
                f"the {split} data has labels that are not in the training data: {shown}. "
                f"Training has: {', '.join(labels.names[:20])}. Check that both files use the same names."
            )
        ids = list(multi_hot(lists, labels)) if labels.task == MULTI_LABEL else [labels.ids[name] for (name,) in lists]
    return table.remove_columns(columns.label).add_column("label", ids)


def _as_number(value: Any, split: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise RequestError(f"the {split} data has the label {value!r}, but regression needs a number.") from error


def _held_out(train: Dataset, labels: Labels, fraction: float, seed: int) -> HeldOut:
    """A seeded split by class, or by a row's rarest label."""
    ids = np.asarray(train["label"])
    classes = len(labels.names)  # 0 for regression
    if labels.task == MULTI_LABEL:
        ids, classes = strata(ids), classes + 1
    return hold_out(ids, classes, fraction, seed, "Check --label_column_name, or add --validation_file.")


def hold_out(ids: npt.NDArray[Any], classes: int, fraction: float, seed: int, mend: str) -> HeldOut:
    """The sorted numbers of the rows kept in train and of those held out, and a note. `ids` are labels of `classes`
    classes, or numbers if `classes` is 0. The held-out share is `fraction`, stratified by class unless there are too
    many; at least one row of each class stays in train. Raises RequestError, ending with `mend`."""
    rows = np.arange(len(ids))
    size = max(1, round(fraction * len(ids)))
    ids = ids if classes else np.zeros(len(ids), dtype=np.int64)
    found, counts = np.unique(ids, return_counts=True)
    if len(ids) <= len(found):
        raise RequestError(
            f"the training data has {len(ids)} rows with {classes or 'no'} labels: too few to hold some out of each. "
            f"{mend}"
        )
    pool, strata = rows[np.isin(ids, found[counts > 1])], int(np.sum(counts > 1))
    if strata <= size <= len(pool) - strata:
        from sklearn.model_selection import train_test_split  # imported only by the rank that prepares

        by = ids[pool] if classes else None
        _, held_out = train_test_split(pool, test_size=size, random_state=seed, stratify=by)
        return np.setdiff1d(rows, held_out), np.sort(held_out), ""
    order = np.random.default_rng(seed).permutation(rows)
    kept = order[np.unique(ids[order], return_index=True)[1]]  # one of each class
    held_out = np.setdiff1d(order, kept, assume_unique=True)[:size]  # in seeded order
    note = (
        f"{len(held_out):,} of {len(ids):,} rows held out at random, not by label: a share of {fraction:g} leaves one "
        f"side without some of the {len(found):,} labels"
    )
    return np.setdiff1d(rows, held_out), np.sort(held_out), note


def settle_splits(
    tables: dict[str, Rows],
    cut: PreparationArguments,
    seed: int,
    held_out: Callable[[Rows], HeldOut],
    select: Callable[[Rows, Any], Rows] = Dataset.select,
) -> tuple[dict[str, Rows], str]:
    """Holds out a part of the training rows if there is no validation split, then limits each split to its
    --max_*_samples; `select` takes the rows with some numbers. Also returns a note, or ""."""
    note = unused_fraction(cut) if "train" in tables and "validation" in tables else ""
    if "train" in tables and "validation" not in tables:
        train = tables["train"]
        kept, apart, note = held_out(train)
        tables = tables | {"train": select(train, kept), "validation": select(train, apart)}
    limits = zip(SPLITS, (cut.max_train_samples, cut.max_eval_samples, cut.max_predict_samples), strict=True)
    asked = {split: most for split, most in limits if split in tables and most is not None}
    rows = {name: at_most(len(tables[name]), most, None if name == "test" else seed) for name, most in asked.items()}
    return tables | {split: select(tables[split], some) for split, some in rows.items()}, note


def at_most(rows: int, most: int, seed: int | None) -> npt.NDArray[np.int64]:
    """The sorted numbers of the rows to keep: a seeded sample, because the first rows of a sorted file may hold one
    class; without a seed, the first rows."""
    if seed is None or most >= rows:
        return np.arange(min(most, rows))
    return np.sort(np.random.default_rng(seed).permutation(rows)[:most])
