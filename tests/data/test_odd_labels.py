"""Labels that may be mistakes: some are refused, others are said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from finetune.data.columns import Labels
from finetune.data.odd_labels import MISSING, note_of_slips
from finetune.data.tables import CleanTables, Table, clean_tables, load_tables
from finetune.errors import RequestError
from finetune.run.flags.text import DataArguments, PreparationArguments


def read(labels: list[Any], folder: Path) -> CleanTables:
    """As a file of JSON has them, of which each row may be of a kind of its own."""
    rows = ({"text": f"words {i}", "label": label} for i, label in enumerate(labels))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = DataArguments(train_file=str(folder / "rows.jsonl"))
    return clean_tables(load_tables(arguments)[0], arguments, PreparationArguments(), 1)


def table(labels: list[Any]) -> Dataset:
    return Dataset.from_list([{"text": f"words {i}", "label": label} for i, label in enumerate(labels)])


def clean(tables: Table, trained: Labels | None = None, **cut: Any) -> CleanTables:
    return clean_tables(tables, DataArguments(), PreparationArguments(**cut), 1, None, trained)


def notes(labels: list[Any]) -> str:
    return "; ".join(clean({"train": table(labels)}).notes)


@pytest.mark.parametrize("word", sorted(MISSING))
@pytest.mark.parametrize("others", [["0", "1"], ["neg", "pos"], ["1.5", "2.5"]])
def test_a_few_words_for_a_missing_value_count_as_empty_labels(word: str, others: list[str]) -> None:
    rows = {"train": table([*others * 20, word, word])}
    with pytest.raises(RequestError, match=f"has 2 of 42 rows with empty .* 41, 42.*'{word}' counts as no label"):
        clean(rows)
    found = clean(rows, skip_bad_rows=True)
    assert found.skipped == {"train": 2}
    assert word not in found.labels.names


def test_of_numbers_any_share_may_be_missing() -> None:
    with pytest.raises(RequestError, match="'nan' counts as no label"):
        clean({"train": table(["1.5", "2.5", "nan", "nan"] * 5)})


def test_many_rows_of_such_a_word_are_a_class_that_is_said() -> None:
    found = clean({"train": table(["EU", "NA"] * 20)})
    assert found.labels.names == ("EU", "NA")
    assert "label: 'NA' is a class; if it means a missing label, leave these rows out" in found.notes


def test_none_is_a_class_that_is_said() -> None:
    assert "'None' is a class;" in notes([*["neg", "pos"] * 20, "None"] * 2)


def test_a_class_of_a_trained_model_is_no_missing_value() -> None:
    trained = Labels("classification", ("NA", "neg", "pos"))
    assert clean({"train": table([*["neg", "pos"] * 20, "NA", "NA"])}, trained).labels == trained


def test_other_splits_leave_out_what_is_no_class_of_the_training_rows() -> None:
    rows = {"train": table(["a", "b"] * 9), "validation": table(["a", "b", "NA"]), "test": table(["NA", "NA"])}
    found = clean(rows, skip_bad_rows=True)
    assert found.skipped == {"train": 0, "validation": 1, "test": 0}
    assert "label" not in found.splits["test"].column_names


def test_a_text_that_is_such_a_word_stays_text() -> None:
    rows = Dataset.from_dict({"text": ["NA", "nan"] * 10, "label": ["a", "b"] * 10})
    assert sum(map(len, clean({"train": rows}).splits.values())) == 20


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["pos", "Pos", "NEG", "neg"], "labels that differ only in case or spaces, each a separate class: 'NEG' and"),
        (["sci fi", "scifi"], "'sci fi' and 'scifi'"),
        (["true", "FALSE", "0"], "one truth value in several spellings, .*'0' and 'FALSE'"),
        (["1", "01", "2"], "one number in several spellings, .*'1' and '01'"),
    ],
)
def test_labels_that_may_be_one_are_said(labels: list[Any], said: str) -> None:
    assert re.search(said, notes(labels * 10))


@pytest.mark.parametrize(
    "labels", [["0", "1"], ["yes", "no"], [True, False], ["y", "x", "1"], ["a", "b"], ["1", "2", "11"]]
)
def test_labels_that_are_different_are_not_said(labels: list[Any]) -> None:
    assert notes(labels * 10) == ""


@pytest.mark.parametrize(
    ("rare", "frequent", "is_said"),
    [
        ("PRE", "PER", True),
        ("posn", "pos", True),
        ("asyncoi", "asyncio", True),
        ("email", "gmail", True),
        ("ositive", "positive", True),
        ("PER", "ORG", False),
        ("label_2", "label_1", False),
        ("type10", "type1", False),
        ("NO", "NN", False),
        ("actor", "author", False),
    ],
)
def test_a_rare_label_a_letter_away_from_a_frequent_one_may_be_misspelt(
    rare: str, frequent: str, is_said: bool
) -> None:
    said = f"labels that may be misspelt, each a separate class: {rare!r} (2) for {frequent!r} (100)"
    assert note_of_slips({rare: 2, frequent: 100}, "labels") == (said if is_said else "")
    assert note_of_slips({rare: 3, frequent: 100}, "labels") == note_of_slips({rare: 2, frequent: 99}, "labels") == ""


def test_of_many_labels_that_may_be_misspelt_some_are_said() -> None:
    counts = {"positive": 5000, **{f"positiv{letter}": 1 for letter in "abcdfg"}}
    assert note_of_slips(counts, "labels").endswith("'positivf' (1) for 'positive' (5,000), and 1 more")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["b", ["a"], "a"], r"row 2 of 'label' is \['a'\], a list, and others are not. Give every row"),
        ([{"name": "0"}, {"name": "1"}], r"row 1 of 'label' is \{'name': '0'\}, an object. Give the name alone"),
    ],
)
def test_lists_and_objects_among_labels_are_refused_with_their_row(
    labels: list[Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=rf"--train_file {tmp_path}/rows.jsonl: {said}"):
        read(labels * 5, tmp_path)


def test_true_is_not_counted_as_one(tmp_path: Path) -> None:
    found = read([True, False, 1] * 9, tmp_path)
    assert found.labels.names == ("1", "False", "True")
    assert "'1' and 'True'" in found.notes[0]
