"""Bad rows, splits and cuts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from finetune.data.builtin import docstring_rows
from finetune.data.columns import Labels
from finetune.data.tables import clean_tables, hold_out
from finetune.data.tokenizer import train_wordpiece
from finetune.errors import RequestError
from finetune.run.flags.text import DataArguments, PreparationArguments

ROWS = {"text": [f"words {i}" for i in range(40)], "label": ["a", "b"] * 20}


def clean(tables: dict[str, dict[str, Any]], arguments: DataArguments | None = None, **cut: Any) -> Any:
    made = {split: Dataset.from_dict(rows) for split, rows in tables.items()}
    return clean_tables(made, arguments or DataArguments(), PreparationArguments(**cut), seed=1)


def test_a_missing_validation_split_is_held_out_by_class_and_by_seed() -> None:
    rows = {"text": ROWS["text"], "label": ["a"] * 30 + ["b"] * 10}
    first, again = clean({"train": rows}, validation_fraction=0.2), clean({"train": rows}, validation_fraction=0.2)
    assert first.splits["validation"]["text"][:] == again.splits["validation"]["text"][:]
    assert sorted(first.splits["validation"]["label"]) == [0] * 6 + [1] * 2
    both = [*first.splits["train"]["text"], *first.splits["validation"]["text"]]
    assert sorted(both) == sorted(rows["text"])


def test_a_trained_model_reads_the_columns_that_it_was_trained_on() -> None:
    texts = {"text": ["words here"] * 4, "body": ["a b"] * 4, "subject": ["c d"] * 4}
    trained = Labels("classification", ("a", "b"), ("subject", "body"))
    made = {"test": Dataset.from_dict(texts)}

    def read(trained: Labels, **flags: Any) -> tuple[str, ...]:
        return clean_tables(made, DataArguments(**flags), PreparationArguments(), 1, None, trained).columns.text

    assert read(trained) == ("subject", "body")
    assert read(trained, text_column_names=["body"]) == ("body",)
    made = {"test": Dataset.from_dict({"text": ["words here"] * 4})}
    with pytest.raises(RequestError, match="test data has no column 'subject', which the model was trained on"):
        read(trained)
    assert read(replace(trained, columns=())) == ("text",)


@pytest.mark.parametrize(
    ("labels", "fraction", "held", "says"),
    [
        pytest.param([i // 2 for i in range(400)], 0.1, 40, True, id="two rows a label"),
        pytest.param([i % 3 for i in range(30)], 0.1, 3, False, id="a row of each"),
        pytest.param([0] * 90 + list(range(1, 11)), 0.1, 10, False, id="a tail of single rows"),
        pytest.param([i // 2 for i in range(40)], 0.9, 20, True, id="more than leaves one of each"),
        pytest.param([0, 0, 0, *range(1, 98)], 0.1, 2, True, id="almost all of one row"),
    ],
)
def test_the_share_that_was_said_is_held_out_and_each_label_stays(
    labels: list[int], fraction: float, held: int, says: bool
) -> None:
    ids = np.array(labels)
    kept, held_out, note = hold_out(ids, len(set(labels)), fraction, 3, "")
    assert len(held_out) == held
    assert sorted([*kept, *held_out]) == list(range(len(ids)))
    assert set(ids[kept]) == set(labels)
    assert bool(note) == says
    if says:
        assert f"{held:,} of {len(ids):,} rows" in note
    assert np.array_equal(hold_out(ids, len(set(labels)), fraction, 3, "")[1], held_out)
    assert not np.array_equal(hold_out(ids, len(set(labels)), fraction, 4, "")[1], held_out) or held < 3


def test_numbers_are_held_out_without_regard_to_what_they_are() -> None:
    kept, held_out, note = hold_out(np.linspace(0, 1, 50), 0, 0.1, 1, "")
    assert (len(kept), len(held_out), note) == (45, 5, "")


def test_rows_of_which_none_can_be_spared_are_refused() -> None:
    with pytest.raises(RequestError, match=r"6 rows with 6 labels: too few .* Fix it"):
        hold_out(np.arange(6), 6, 0.1, 1, "Fix it")


def test_what_a_run_reads_otherwise_than_somebody_may_think_is_noted() -> None:
    rows = {"text": [f"t {i}" for i in range(40)], "title": ["x"] * 40, "label": [float(i // 2) for i in range(40)]}
    cleaned = clean({"train": rows})
    assert cleaned.columns.others == ("title",)
    assert ["classes" in note for note in cleaned.notes] == [True, False]
    assert "4 of 40 rows held out at random, not by label" in cleaned.notes[1]
    stars = clean({"train": {**rows, "label": [1.0, 0.0] * 20}, "validation": {**rows, "label": [1, 0] * 20}})
    assert stars.labels.names == ("0", "1")
    assert stars.splits["validation"]["label"][:2] == stars.splits["train"]["label"][:2] == [1, 0]


def test_a_share_to_hold_out_that_does_nothing_is_noted() -> None:
    rows = {"text": ["a b", "c d", "e f", "g h"], "label": ["x", "y", "x", "y"]}
    tables = {"train": Dataset.from_dict(rows), "validation": Dataset.from_dict(rows)}
    found = clean_tables(tables, DataArguments(), PreparationArguments(validation_fraction=0.25), 0)
    assert found.notes == ("--validation_fraction 0.25 has no effect, because there is a validation split",)


def test_bad_rows_are_refused_with_their_numbers_or_left_out_when_told_so() -> None:
    rows = {"text": [*ROWS["text"], "", "fine"], "label": [*ROWS["label"], "a", None]}
    with pytest.raises(RequestError, match=r"2 of 42 rows with empty text or label \(counted.*: 41, 42\)"):
        clean({"train": rows})
    assert clean({"train": rows}, skip_bad_rows=True).skipped == {"train": 2}


BREAKS = ["one<br /><br />two", "a <BR/>b</br>", '<br clear="all">x', "<broken> a < b", "plain"]
CLEAN = ["one\n\ntwo", "a \nb\n", "\nx", "<broken> a < b", "plain"]


def test_html_line_breaks_are_cleaned_of_every_text_when_told_so() -> None:
    rows = {"a": BREAKS * 8, "b": BREAKS * 8, "label": ["<br>", "x"] * 20}
    tables = {"train": rows, "validation": rows, "test": rows}
    columns = DataArguments(text_column_names=["a", "b"], label_column_name="label")
    assert clean(tables, columns).splits["validation"]["a"][:5] == BREAKS
    cleaned = clean(tables, replace(columns, clean_line_breaks=True))
    for split in ("train", "validation", "test"):
        assert cleaned.splits[split]["a"][:] == cleaned.splits[split]["b"][:] == CLEAN * 8
    assert cleaned.labels.names == ("<br>", "x"), "labels are names"


def test_a_text_of_line_breaks_alone_is_empty() -> None:
    rows = {"text": [*ROWS["text"], "<br />"], "label": [*ROWS["label"], "a"]}
    with pytest.raises(RequestError, match="1 of 41 rows with empty text"):
        clean({"train": rows}, DataArguments(clean_line_breaks=True))


def test_a_test_row_keeps_its_number_when_bad_rows_are_left_out() -> None:
    rows = {"text": ["a", "", "c", "d"], "label": ["a", "b", None, "a"]}
    assert clean({"train": ROWS, "test": rows}, skip_bad_rows=True).splits["test"]["row"][:] == [0, 3]


def test_the_classes_of_a_trained_model_keep_their_ids() -> None:
    train = {"train": Dataset.from_dict(ROWS)}

    def labels(names: list[str] | None) -> Any:
        trained = Labels("classification", tuple(names)) if names else None
        cleaned = clean_tables(train, DataArguments(), PreparationArguments(), seed=1, trained=trained)
        return cleaned.labels.names, cleaned.splits["train"]["label"][:2]

    assert labels(["b", "a"]) == (("b", "a"), [1, 0])
    assert labels(["x", "y"]) == labels(None) == (("a", "b"), [0, 1])


def test_a_trained_model_needs_no_training_data_to_evaluate_or_predict() -> None:
    trained = Labels("classification", ("b", "a"))
    tables = {"test": Dataset.from_dict({"text": ["x", "y z"]}), "validation": Dataset.from_dict(ROWS)}
    for some in ({"test": tables["test"]}, tables):
        cleaned = clean_tables(some, DataArguments(), PreparationArguments(), seed=1, trained=trained)
        assert cleaned.labels == trained
        assert set(cleaned.splits) == set(some)
    assert cleaned.splits["validation"]["label"][:2] == [1, 0]
    with pytest.raises(RequestError, match=r"no training data to learn the labels from.*--do_train False"):
        clean_tables(tables, DataArguments(), PreparationArguments(), seed=1)


def test_a_label_that_training_lacks_is_refused_with_its_count() -> None:
    with pytest.raises(RequestError, match=r"validation data has labels .*'c' \(2 rows\).*Training has: a, b"):
        clean({"train": ROWS, "validation": {"text": ["x", "y"], "label": ["c", "c"]}})


def test_a_test_split_may_be_without_labels() -> None:
    unlabelled = clean({"train": ROWS, "test": {"text": ["x", "y"]}})
    assert unlabelled.splits["test"].column_names == ["text", "row"]
    empty = clean({"train": ROWS, "test": {"text": ["x", "y"], "label": [None, None]}})
    assert empty.splits["test"].column_names == ["text", "row"]


def test_hidden_labels_of_a_hub_test_split_are_no_labels() -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    train = Dataset.from_dict({"text": ["a b", "c d"] * 10, "label": [0, 1] * 10}, features=features)
    test = Dataset.from_dict({"text": ["e", "f"], "label": [-1, -1]}, features=features)
    cleaned = clean_tables({"train": train, "test": test}, DataArguments(), PreparationArguments(), seed=1)
    assert cleaned.labels.names == ("neg", "pos")
    assert cleaned.splits["test"].column_names == ["text", "row"]
    wrong = Dataset.from_dict({"text": ["e", "f"], "label": [0, -2]}).cast(features)
    with pytest.raises(RequestError, match="test data, row 2: has the id -2, but the 2 names have ids from 0 to 1"):
        clean_tables({"train": train, "test": wrong}, DataArguments(), PreparationArguments(), seed=1)


def test_a_cut_of_a_sorted_file_holds_all_classes() -> None:
    rows = {"text": [f"t {i}" for i in range(200)], "label": ["a"] * 100 + ["b"] * 100}
    cut = clean({"train": rows}, max_train_samples=40)
    assert len(cut.splits["train"]) == 40
    assert set(cut.splits["train"]["label"]) == {0, 1}
    first = clean({"train": rows, "test": rows}, max_predict_samples=3)
    assert first.splits["test"]["text"][:] == ["t 0", "t 1", "t 2"]


def test_the_built_in_text_is_a_real_task() -> None:
    rows = docstring_rows()
    assert len(rows["text"]) > 2000
    counts = [rows["label"].count(name) for name in set(rows["label"])]
    assert len(counts) >= 8
    assert max(counts) < 0.3 * sum(counts)
    assert min(len(text) for text in rows["text"]) >= 40
    assert docstring_rows() == rows


def test_one_text_gives_one_vocabulary() -> None:
    # The trainer itself does not: tokenizers numbers pieces as a hash map yields them.
    texts = docstring_rows()["text"][:600]
    vocabularies = [train_wordpiece(texts, 3000, 128).get_vocab() for _ in range(3)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]


def test_the_vocabulary_splits_words_as_bert_does() -> None:
    tokenizer = train_wordpiece(docstring_rows()["text"], 3000, 128)
    ids = tokenizer("The ##a event loop", "in ASYNCIO")
    assert tokenizer.convert_ids_to_tokens(ids["input_ids"])[:2] == ["[CLS]", "the"]
    assert tokenizer.decode(ids["input_ids"], skip_special_tokens=True).endswith("event loop in asyncio")
    assert len(tokenizer) <= 3000
