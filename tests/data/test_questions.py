"""Rows of questions, and windows in which their answers lie."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset

from finetune.data.question_answering import (
    CONTEXT,
    FIRST,
    ID,
    LAST,
    NULL,
    STARTS,
    TEXTS,
    clean_questions,
    collate,
    encode_windows,
    function_questions,
    load_questions,
)
from finetune.data.tokenizer import train_wordpiece
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.question_answering import QuestionDataArguments

LONG = " ".join(f"In {1800 + i} the town of number{i} was founded by settler{i}." for i in range(30))
ROWS: list[dict[str, Any]] = [
    {
        "id": f"q{i}",
        "question": f"Who founded number{i}?",
        "context": LONG,
        "answers": {"text": [f"settler{i}"], "answer_start": [LONG.index(f"settler{i}.")]},
    }
    for i in range(0, 30, 3)
]
TOKENIZER = train_wordpiece([LONG, *(row["question"] for row in ROWS)], 400, 64, lowercase=False)


def cleaned(rows: list[dict[str, Any]], skip: bool = False, split: str = "validation", **asked: Any) -> Any:
    cut = PreparationArguments(skip_bad_rows=skip)
    return clean_questions({split: Dataset.from_list(rows)}, QuestionDataArguments(**asked), cut, 0)


def windows(rows: list[dict[str, Any]], stride: int = 16, length: int = 64) -> dict[str, list[Any]]:
    found = cleaned(rows)
    return encode_windows(stride, TOKENIZER, found.columns, length, found.splits["validation"].to_dict())


@pytest.mark.parametrize("indent", [None, 1], ids=["a line", "many lines"])
def test_squads_own_json_gives_the_rows_that_flat_files_have(tmp_path: Path, indent: int | None) -> None:
    asked = [
        {"id": row["id"], "question": row["question"],
         "answers": [{"text": row["answers"]["text"][0], "answer_start": row["answers"]["answer_start"][0]}]}
        for row in ROWS
    ]  # fmt: skip
    nested = {"version": "1.1", "data": [{"title": "Towns", "paragraphs": [{"context": LONG, "qas": asked}]}]}
    (tmp_path / "nested.json").write_text(json.dumps(nested, indent=indent))
    (tmp_path / "flat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "field.json").write_text(json.dumps({"data": ROWS}))
    found = []
    for name in ("nested.json", "flat.jsonl", "field.json"):
        arguments = QuestionDataArguments(validation_file=str(tmp_path / name))
        tables, source = load_questions(arguments)
        assert source == name
        found.append(clean_questions(tables, arguments, PreparationArguments(), 0).splits["validation"].to_list())
    assert len(found[0]) == len(ROWS)
    assert found[0] == found[1] == found[2]


def test_windows_hold_the_whole_context_and_each_answer_where_it_stands() -> None:
    made = windows(ROWS)
    seen: dict[str, list[str]] = {}
    covered: dict[str, set[int]] = {}
    for i, (first, last, length) in enumerate(made["labels"]):
        assert length == len(made["input_ids"][i]) <= 64
        characters = [(a, b) for a, b in zip(made[FIRST][i], made[LAST][i], strict=True) if a >= 0]
        covered.setdefault(made[ID][i], set()).update(at for a, b in characters for at in range(a, b))
        if first == made[NULL][i]:
            assert made["input_ids"][i][first] == TOKENIZER.cls_token_id
            continue
        seen.setdefault(made[ID][i], []).append(made[CONTEXT][i][made[FIRST][i][first] : made[LAST][i][last]])
    assert {name: set(texts) for name, texts in seen.items()} == {
        row["id"]: {row["answers"]["text"][0]} for row in ROWS
    }
    solid = {i for i, character in enumerate(LONG) if not character.isspace()}
    assert all(solid <= places for places in covered.values())


def test_windows_that_follow_each_other_share_as_many_tokens_as_asked() -> None:
    made = windows(ROWS[:1], stride=20)
    contexts = [
        [token for token, first in zip(ids, firsts, strict=True) if first >= 0]
        for ids, firsts in zip(made["input_ids"], made[FIRST], strict=True)
    ]
    assert len(contexts) > 5
    assert all(one[-20:] == other[:20] for one, other in pairwise(contexts))


def test_a_question_that_leaves_no_room_is_cut_and_counted() -> None:
    made = windows([{**ROWS[0], "question": LONG}, ROWS[1]])
    assert {name for name, was_cut in zip(made[ID], made["truncated"], strict=True) if was_cut} == {ROWS[0]["id"]}
    with pytest.raises(RequestError, match=r"--doc_stride 60: .* Give at most"):
        windows(ROWS, stride=60)


def test_answers_that_do_not_stand_there_are_refused_or_counted() -> None:
    wrong = {**ROWS[0], "answers": {"text": ["settler0"], "answer_start": [0]}}
    with pytest.raises(
        RequestError, match=r"1 of 3 rows that are bad: the context does not have the answer's text at its"
    ):
        cleaned([ROWS[1], wrong, ROWS[2]])
    found = cleaned([ROWS[1], wrong, ROWS[2]], skip=True)
    assert found.skipped == {"validation": 1}
    assert found.splits["validation"][ID] == ["q3", "q6"]


def alone(text: str, context: str = "Ada met Alan. I know Alan.", **more: Any) -> dict[str, Any]:
    return {"question": "Who?", "context": context, "answers": text, **more}


def test_an_answer_that_is_a_text_is_located_where_its_context_has_it_once() -> None:
    rows = [
        alone("Ada", answer_start=None),
        alone(" know "),
        alone("met Alan"),
        alone("人", "我是人。"),
        alone("서울", "서울에서 만났다."),
        alone("علم", "قلم وعلم علم"),
        alone("Alan", answer_start=21),
    ]
    found = cleaned(rows)
    split = found.splits["validation"]
    assert [text for (text,) in split[TEXTS]] == ["Ada", "know", "met Alan", "人", "서울", "علم", "Alan"]
    assert [start for (start,) in split[STARTS]] == [0, 16, 4, 2, 0, 9, 21]
    assert found.notes == (
        "answers without answer_start are located, each where its context has it once as whole words",
    )
    assert found.columns.others == ()
    assert cleaned([alone("Alan", answer_start="8")]).notes == ()
    mapped = [{"question": "Who?", "context": "Ada met Alan.", "answer": "Ada"}]
    assert cleaned(mapped, column_mapping=["answer=answers"]).splits["validation"][STARTS] == [[0]]
    with pytest.raises(RequestError, match=r"no column 'answers'; .* --column_mapping answer=answers\. Texts without"):
        cleaned(mapped)
    none = cleaned([alone("Ada"), alone(" ")], version_2_with_negative=True).splits["validation"]
    assert none[TEXTS] == [["Ada"], []]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        pytest.param(alone("Alan"), "exactly once as whole words, so its answer_start must be given", id="twice"),
        pytest.param(alone("no"), "exactly once as whole words", id="within a word"),
        pytest.param(alone("राम", "रामायण"), "exactly once as whole words", id="within a word of Hindi"),
        pytest.param(alone("Bob"), "exactly once as whole words", id="not there"),
        pytest.param(alone("Ada", answer_start=3), "at its answer_start, in characters from 0", id="elsewhere"),
        pytest.param(alone("Ada", answer_start="x"), "answers do not have texts with answer_start", id="no number"),
    ],
)
def test_the_place_of_an_answer_is_not_guessed(row: dict[str, Any], said: str) -> None:
    good = alone("Ada", **({"answer_start": type(row["answer_start"])(0)} if "answer_start" in row else {}))
    with pytest.raises(RequestError, match=rf"1 of 2 rows that are bad: .*{said}.*: 2\).*--skip_bad_rows"):
        cleaned([good, row])
    with pytest.raises(RequestError, match=rf"1 of 1 rows that are bad: .*{said}.*: 1\)\. Fix them\.$"):
        cleaned([row])
    assert cleaned([good, row], skip=True).skipped == {"validation": 1}


def test_objects_that_a_csv_holds_as_text_are_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "qa.csv"
    pandas.DataFrame(ROWS).to_csv(path, index=False)
    arguments = QuestionDataArguments(train_file=str(path))
    with pytest.raises(RequestError, match=r"qa.csv: 'answers' holds objects as texts, such as \{'text': \['settler0'"):
        clean_questions(load_questions(arguments)[0], arguments, PreparationArguments(), 0)


def test_questions_without_an_answer_are_to_be_meant() -> None:
    none = {**ROWS[0], "answers": {"text": [], "answer_start": []}}
    with pytest.raises(RequestError, match=r"row 2 has no answer.*--version_2_with_negative True"):
        cleaned([ROWS[1], none])
    found = cleaned([ROWS[1], none], version_2_with_negative=True)
    assert found.notes == ("1 of 2 validation questions have no answer",)


def test_a_test_file_needs_no_answers_and_other_names_are_mapped() -> None:
    rows = [{"ask": row["question"], "body": row["context"]} for row in ROWS]
    found = cleaned(rows, split="test", column_mapping=["ask=question", "body=context"])
    assert found.splits["test"][ID] == [str(i) for i in range(len(ROWS))]
    assert TEXTS not in found.splits["test"].column_names
    with pytest.raises(RequestError, match=r"no column 'question'; it has ask, body"):
        cleaned(rows)
    with pytest.raises(RequestError, match="aks=question: the data has no column 'aks'"):
        cleaned(ROWS, column_mapping=["aks=question"])


def test_held_out_questions_share_no_context_with_those_trained_on() -> None:
    rows = [{**row, "context": f"{LONG} {i // 2}"} for i, row in enumerate(ROWS)]
    splits = cleaned(rows, split="train").splits
    assert splits["validation"].num_rows == 2
    assert set(splits["train"][CONTEXT]).isdisjoint(splits["validation"][CONTEXT])


def test_padding_stands_on_the_right_whichever_side_the_tokenizer_has() -> None:
    made = windows(ROWS[:1])
    rows = [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]
    tokenizer = train_wordpiece([LONG], 400, 64)
    tokenizer.padding_side = "left"
    batch = collate(tokenizer, rows)
    assert batch["attention_mask"].sum(1).tolist() == [row["length"] for row in rows]
    assert batch["attention_mask"][:, 0].all()


def test_built_in_questions_are_answered_where_they_say_and_leak_nothing() -> None:
    found = function_questions()
    assert len(found["train"]) > 5_000
    assert len(found["validation"]) > 500
    for row in (*found["train"], *found["validation"]):
        (text,), (start,) = row["answers"].values()
        assert row["context"].startswith(text, start)
    assert {row["context"] for row in found["train"]}.isdisjoint(row["context"] for row in found["validation"])
