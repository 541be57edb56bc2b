"""Documents that are there twice, or nearly, and those that the held-out part has as well."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import launch
from datasets import Dataset

from finetune.data.documents import open_corpora
from finetune.data.duplicates import find_duplicates, inputs_of, notes_of_trained
from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.flags.language import CorpusArguments
from finetune.run.launch import Launch
from finetune.run.resolve import resolve

GENERATOR = random.Random(0)
WORDS = [f"word{i}" for i in range(5000)]
TEXTS = [" ".join(GENERATOR.choices(WORDS, k=120)) for _ in range(60)]
NEAR = TEXTS[1].replace(TEXTS[1].split()[50], "other")


def test_duplicates_are_found_whatever_their_case_and_blanks_and_the_first_is_kept() -> None:
    found = find_duplicates([*TEXTS, TEXTS[0].upper().replace(" ", "\n"), NEAR, "2 + 2", "2 - 2", "2 +  2"], [])
    assert (found.exact, found.near, found.overlapping) == (2, 1, 0)
    assert found.keep.tolist() == [True] * 60 + [False, False, True, True, False]


def test_a_text_that_shares_many_words_is_no_duplicate() -> None:
    other = " ".join([*TEXTS[0].split()[:60], *TEXTS[1].split()[60:]])
    found = find_duplicates([*TEXTS, other], [])
    assert (found.exact, found.near) == (0, 0)


def test_held_out_documents_that_training_has_in_part_are_counted_and_set_phrases_are_not() -> None:
    part = " ".join(TEXTS[3].split()[20:33])
    phrase = "the same thirteen words or more stand before each and every one of these documents here"
    training = [f"{phrase} {text}" for text in TEXTS]
    found = find_duplicates(training, [f"new {part} words", f"{phrase} and then something new", "quite new"])
    assert found.overlapping == 1
    assert [i for i, keep in enumerate(found.keep) if not keep] == [3]
    short = find_duplicates(["yes it is", *TEXTS], ["Yes it is"])
    assert (short.overlapping, bool(short.keep[0])) == (1, False)


def test_what_is_looked_at_is_bounded_and_said() -> None:
    found = find_duplicates([*TEXTS, *TEXTS], [], most=len(TEXTS[0]) * 20)
    assert len(found.keep) < 30
    assert found.note(120, 5, False) == ""
    found = find_duplicates([TEXTS[0], *TEXTS], [], most=len(TEXTS[0]) * 20)
    assert f"1 exact and 0 near duplicates among 61 training documents (of the first {len(found.keep)})" in found.note(
        61, 5, False
    )


def chats(folder: Path) -> list[str]:
    """Two files; in the second are answers of the first."""
    rules = {"role": "system", "content": "Be brief and kind, and say what you know and nothing else at all, please."}
    for name, texts in (("a", TEXTS[:40]), ("b", [*TEXTS[40:50], *TEXTS[:4]])):
        rows = [[rules, {"role": "user", "content": t[:60]}, {"role": "assistant", "content": t}] for t in texts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (folder / "v.jsonl").write_text(json.dumps({"messages": [rules, {"role": "assistant", "content": TEXTS[9]}]}))
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


@pytest.mark.parametrize("drops", [False, True])
def test_conversations_of_all_files_are_compared_without_what_the_system_says(drops: bool, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"train_file": chats(tmp_path), "validation_file": str(tmp_path / "v.jsonl")}
    corpora = open_corpora(CorpusArguments(**flags, drop_duplicates=drops), seed=1)
    assert [len(one.train) for one in corpora] == ([39, 10] if drops else [40, 14])
    (note,) = corpora[0].notes
    end = "; 5 dropped" if drops else "; --drop_duplicates True drops these from training"
    assert note == (
        "4 exact and 0 near duplicates among 54 training documents; "
        "1 of 1 held-out documents share 13 words in a row with them" + end
    )


def test_a_file_that_is_only_evaluated_is_not_compared_with_itself(tmp_path: Path) -> None:
    chats(tmp_path)
    (corpus,) = open_corpora(CorpusArguments(validation_file=str(tmp_path / "v.jsonl")), seed=1)
    assert not corpus.notes


def test_a_stream_is_not_compared() -> None:
    words = "--train_file a.jsonl --streaming True --max_steps 2 --tokenizer byte --drop_duplicates True"
    with pytest.raises(RequestError, match=r"drop_duplicates.*A stream is not searched"):
        resolve(recipes()["causal_lm"], words.split(), Launch(), is_here=False)


def notes(tables: dict[str, Dataset], *columns: str) -> list[str]:
    return notes_of_trained({split: inputs_of(table, columns) for split, table in tables.items()})


def test_held_out_rows_that_are_training_rows_are_counted_split_by_split() -> None:
    rows = [["a", "b", "c"], ["d"], [], ["e", "f"], ["g"], ["a", "b"], ["c"]]
    whole = Dataset.from_dict({"tokens": rows, "more": ["x"] * 7, "label": list(range(7))})
    tables = {
        "train": whole.select([6, 3, 0]),  # by indices, as held-out rows are drawn
        "validation": Dataset.from_dict({
            "tokens": [["c"], ["a"], ["b", "c"], ["a", "b", "c"], ["c"]], "more": ["x", "x", "x", "x", "y"]
        }),
        "test": whole.select([1, 2]),
    }  # fmt: skip
    said = "{} of 5 validation rows have the same inputs as a training row, which makes scores too good"
    assert notes(tables, "tokens") == [said.format(3)]
    assert notes(tables, "tokens", "more") == [said.format(2)]
    assert notes({"test": tables["test"]}, "tokens") == []
    assert notes({"train": tables["train"]}, "tokens") == []


@pytest.mark.parametrize(
    ("recipe", "columns"),
    [
        ("seq_cls", {"text": "some words {}", "label": "a"}),
        ("seq2seq", {"source": "some words {}", "target": "one"}),
        ("preference", {"prompt": "some words {}", "chosen": "yes", "rejected": "no"}),
        ("embedding", {"anchor": "some words {}", "positive": "more words {}"}),
    ],
)
def test_a_recipe_counts_held_out_rows_that_it_trains_on(recipe: str, columns: dict[str, str], tmp_path: Path) -> None:
    def write(name: str, numbers: range) -> str:
        rows = [{key: value.format(n) for key, value in columns.items()} for n in numbers]
        rows = [row | ({"label": "ab"[n % 2]} if "label" in row else {}) for n, row in zip(numbers, rows, strict=True)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    files = {"train_file": write("train.jsonl", range(40)), "validation_file": write("v.jsonl", range(37, 47))}
    values = {**files, "max_steps": 1, "do_eval": False, "eval_strategy": "no"}
    done = launch("python", tmp_path / "run", {**values, "save_strategy": "no"}, recipe=f"recipes/{recipe}.py")
    assert "3 of 10 validation rows have the same inputs as a training row, which makes scores too good" in done.output
