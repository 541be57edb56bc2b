"""Rows for embeddings: which columns are read as what, what is refused, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value

from finetune.data.columns import WIDTHS
from finetune.data.embedding import IDS, KEYS, collate, encode
from finetune.data.embedding_rows import CLASSES, JUDGED, PAIRS, SCORED, clean_rows, find_rows, said_rows
from finetune.data.tokenizer import train_wordpiece
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.embedding import EmbeddingDataArguments

CUT = PreparationArguments(validation_fraction=0.25)


def cleaned(rows: list[dict[str, Any]], cut: PreparationArguments = CUT, **flags: Any) -> Any:
    return clean_rows({"train": Dataset.from_list(rows)}, EmbeddingDataArguments(**flags), cut, seed=0)


@pytest.mark.parametrize(
    ("names", "kind", "texts", "judged"),
    [
        (["anchor", "positive"], PAIRS, ("anchor", "positive"), None),
        (["Query", "Passage", "id"], PAIRS, ("Query", "Passage"), None),
        (["negative_2", "anchor", "positive", "negative_1"], PAIRS,
         ("anchor", "positive", "negative_1", "negative_2"), None),
        (["negative_10", "negative_9", "query", "positive"], PAIRS,
         ("query", "positive", "negative_9", "negative_10"), None),
        (["query", "pos", "neg"], PAIRS, ("query", "pos", "neg"), None),
        (["question", "answer"], PAIRS, ("question", "answer"), None),
        (["sentence1", "sentence2", "score"], SCORED, ("sentence1", "sentence2"), "score"),
        (["sentence1", "sentence2"], PAIRS, ("sentence1", "sentence2"), None),
        (["text", "label"], CLASSES, ("text",), "label"),
    ],
)  # fmt: skip
def test_columns_are_found_by_their_names(names: list[str], kind: str, texts: Any, judged: str | None) -> None:
    found = find_rows(names, "here")
    assert (found.kind, found.texts, found.judged) == (kind, texts, judged)


def test_other_names_are_refused_and_can_be_renamed() -> None:
    rows = [{"title": f"a{n}", "body": f"b{n}"} for n in range(8)]
    with pytest.raises(RequestError, match=r"no columns with known names.*It has title, body.*--column_mapping"):
        cleaned(rows)
    with pytest.raises(RequestError, match=r"Preferences are for recipes/preference\.py"):
        find_rows(["prompt", "chosen", "rejected"], "here")
    with pytest.raises(RequestError, match=r"recipes/preference\.py"):
        cleaned([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(RequestError, match=r"tilte=other: the data has no column 'tilte'; it has title, body\."):
        cleaned(rows, column_mapping=["title=anchor", "body=positive", "tilte=other"])
    found = cleaned(rows, column_mapping=["title=anchor", "body=positive"])
    assert found.splits["train"].num_rows + found.splits["validation"].num_rows == 8


def test_lists_of_positives_are_rows_and_lists_of_negatives_are_as_many_as_the_fewest() -> None:
    rows = [{"query": f"q{n}", "pos": [f"p{n}", f"r{n}"], "neg": ["x", "y", "z"][: 2 + n % 2]} for n in range(8)]
    found = cleaned(rows)
    table = found.splits["train"]
    assert {"text_0", "text_1", "text_2", "text_3"} < set(table.column_names)
    assert "text_4" not in table.column_names
    assert len(table) + len(found.splits["validation"]) == 16
    assert any("up to 3 negatives; the first 2" in note for note in found.notes)


def test_an_anchor_is_on_one_side_alone() -> None:
    rows = [{"anchor": f"a{n // 3}", "positive": f"p{n}"} for n in range(60)]
    found = cleaned(rows)
    sides = [set(found.splits[split]["text_0"]) for split in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 5


def test_labels_are_ids_in_the_order_of_their_names_and_each_is_held_out() -> None:
    rows = [{"text": f"t{n}", "label": "ba"[n % 2]} for n in range(40)]
    found = cleaned(rows)
    assert found.labels.names == ("a", "b")
    assert set(found.splits["validation"][JUDGED]) == {0, 1}


def test_scores_are_numbers() -> None:
    rows = [{"sentence1": f"a{n}", "sentence2": f"b{n}", "score": str(n / 2)} for n in range(8)]
    assert set(cleaned(rows).splits["train"][JUDGED]) <= {n / 2 for n in range(8)}
    rows[3]["score"] = "good"
    with pytest.raises(RequestError, match=r"row 4: score must be a number, and is 'good'"):
        cleaned(rows)


def test_classes_of_pairs_are_no_scores_unless_that_is_said() -> None:
    rows = [{"sentence1": f"a{n}", "sentence2": f"b{n}", "label": n % 3} for n in range(9)]
    with pytest.raises(RequestError, match=r"labels 0, 1, 2 may be classes of pairs"):
        cleaned(rows)
    assert cleaned(rows, column_mapping=["label=score"]).labels.task == SCORED
    two = [{**row, "label": row["label"] % 2} for row in rows]
    assert cleaned(two).labels.task == SCORED


@pytest.mark.parametrize("empty", ["", " ", None])
def test_empty_texts_are_refused_with_their_rows_or_left_out(empty: Any) -> None:
    rows = [{"anchor": f"a{n}", "positive": empty if n == 2 else f"p{n}"} for n in range(8)]
    with pytest.raises(RequestError, match=r"1 of 8 rows with an empty text.*: 3\)\..*--skip_bad_rows True"):
        cleaned(rows)
    found = cleaned(rows, PreparationArguments(validation_fraction=0.25, skip_bad_rows=True))
    assert found.skipped == {"train": 1}


@pytest.mark.parametrize(("score", "none"), [(1.0, None), ("1.0", "")], ids=["JSON", "CSV"])
def test_a_score_or_a_label_that_is_missing_is_an_empty_row(score: Any, none: Any) -> None:
    rows = [{"sentence1": f"a{n}", "sentence2": f"b{n}", "score": none if n else score} for n in range(3)]
    with pytest.raises(RequestError, match="2 of 3 rows"):
        cleaned(rows)
    labelled = [{"text": f"a{n}", "label": "a" if n < 4 else "b" if n < 8 else None} for n in range(9)]
    with pytest.raises(RequestError, match="1 of 9 rows"):
        cleaned(labelled)


def test_hidden_labels_are_no_class_and_such_a_test_set_is_left_out() -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    labels = {"train": [0, 1] * 8, "validation": [0, 1, 1, -1], "test": [-1] * 4}
    tables = {
        split: Dataset.from_dict({"text": [f"{split} {i}" for i in range(len(ids))], "label": ids}, features=features)
        for split, ids in labels.items()
    }
    asked, cut = EmbeddingDataArguments(), PreparationArguments(skip_bad_rows=True)
    found = clean_rows(tables, asked, cut, seed=0)
    assert found.labels.names == ("0", "1")
    assert found.skipped == {"train": 0, "validation": 1}
    assert found.notes[0] == "the test split is left out, because its column 'label' is hidden"


@pytest.mark.parametrize("scores", [[None, None], []], ids=["empty", "no row"])
def test_a_test_file_without_a_score_is_refused(scores: list[Any]) -> None:
    rows = {"sentence1": ["a", "b", "c", "d"], "sentence2": ["e", "f", "g", "h"], "score": [1.0, 2.0, 3.0, 4.0]}
    test = {name: values[: len(scores)] for name, values in rows.items()} | {"score": scores}
    tables = {"train": Dataset.from_dict(rows), "validation": Dataset.from_dict(rows), "test": Dataset.from_dict(test)}
    with pytest.raises(RequestError, match=r"--test_file test\.csv"):
        clean_rows(tables, EmbeddingDataArguments(test_file="test.csv"), PreparationArguments(), seed=0)


def test_one_label_alone_is_refused() -> None:
    with pytest.raises(RequestError, match="label is the same in every row"):
        cleaned([{"text": f"a{n}", "label": "x"} for n in range(9)])


def test_what_is_no_text_is_refused_with_its_row() -> None:
    rows: list[dict[str, Any]] = [{"anchor": [{"role": "user"}], "positive": "b"}] * 3
    with pytest.raises(RequestError, match=r"row 1: must have texts, and has .*role"):
        cleaned(rows)


def test_the_first_line_says_what_is_read() -> None:
    found = cleaned([{"anchor": f"a{n}", "positive": "p", "negative": "n", "id": n} for n in range(8)])
    said = "reads anchor as anchor, positive as positive, negative as negatives, not id"
    assert said_rows(found.columns, PAIRS) == said


def test_prompts_stand_before_texts_that_are_cut_and_counted_and_are_no_part_of_their_keys() -> None:
    tokenizer = train_wordpiece(["query passage : one two three four"] * 9, 400, 512)
    arguments = EmbeddingDataArguments(query_prompt="query : ", document_prompt="passage : ")
    rows = {"text_0": ["one", "two"], "text_1": ["one two three four", "one"]}
    made = encode(arguments, tokenizer, None, 6, rows)  # type: ignore[arg-type]
    words = [[tokenizer.decode(ids, skip_special_tokens=True) for ids in row] for row in made[IDS]]
    assert words[0] == ["query : one", "passage : one two"]
    assert made["truncated"] == [True, False]
    assert made["length"] == [6, 5]
    assert made[KEYS][0][0] == made[KEYS][1][1], "one text on either side"
    assert made[KEYS][0][0] != made[KEYS][1][0]


def test_a_batch_has_all_first_texts_and_then_all_second_ones() -> None:
    rows = [{IDS: [[1, 2], [3]], KEYS: [5, 2**62], JUDGED: 0.1}, {IDS: [[4], [6, 7, 8]], KEYS: [7, 8], JUDGED: 257}]
    batch = collate(0, rows)
    assert batch["input_ids"].tolist() == [[1, 2, 0], [4, 0, 0], [3, 0, 0], [6, 7, 8]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 1, 1, 3]
    assert batch[WIDTHS] == [2, 3]
    assert batch[KEYS].tolist()[0][1] == 2**62
    assert not batch[JUDGED].is_floating_point(), "bf16 would make 256 of 257"
    assert batch[JUDGED].view(torch.float32).tolist() == [pytest.approx(0.1), 257]


def test_a_list_of_anchors_is_no_text() -> None:
    rows = [{"anchor": anchor, "positive": "p", "negative": "n"} for anchor in (["one"], ["two", "three"])]
    with pytest.raises(RequestError, match=r"row 2: must have texts, and has .*two.*three"):
        cleaned(rows)


def test_a_split_without_negatives_takes_none_from_another() -> None:
    train = [{"query": f"q{i}", "pos": "p", "neg": ["n", "m"]} for i in range(8)]
    test = [{"query": "q", "pos": "p", "neg": []}]
    tables = {"train": Dataset.from_list(train), "test": Dataset.from_list(test)}
    found = clean_rows(tables, EmbeddingDataArguments(), CUT, seed=0).splits
    assert "text_3" in found["train"].column_names
    assert "text_2" not in found["test"].column_names


def test_a_row_that_is_left_out_takes_no_negatives_from_the_others() -> None:
    rows = [{"query": f"q{i}", "pos": "p" if i else "", "neg": ["n"] if i else []} for i in range(8)]
    found = cleaned(rows, PreparationArguments(validation_fraction=0.25, skip_bad_rows=True)).splits
    assert "text_2" in found["train"].column_names


def test_one_anchor_cannot_be_held_out() -> None:
    with pytest.raises(RequestError, match="all training rows have the same query"):
        cleaned([{"query": "q", "pos": f"p{i}"} for i in range(8)])


def test_labels_with_one_held_out_text_each_are_said() -> None:
    rows = [{"text": f"{label} {i}", "label": label} for label in "ab" for i in range(4)]
    assert any("recall cannot be measured" in note for note in cleaned(rows).notes)


def test_the_models_own_document_prompt_is_no_mistake_of_the_user() -> None:
    rows = [{"text": f"{label} {i}", "label": label} for label in "ab" for i in range(8)]
    cleaned(rows, document_prompt="passage: ")
    tables = {"train": Dataset.from_list(rows)}
    with pytest.raises(RequestError, match="has no effect, because each row is one text"):
        clean_rows(tables, EmbeddingDataArguments(), CUT, seed=0, said_prompt="passage: ")
