"""Pairs of texts: which columns they are in, what is refused, what is cut, and the built-in ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from datasets import Dataset

from finetune.data.find_columns import find_pair
from finetune.data.seq2seq import clean_pairs, encode_pairs, function_rows, train_tokenizer
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.seq2seq import PairArguments


@pytest.mark.parametrize(
    ("names", "flags", "found"),
    [
        (["id", "document", "summary"], {}, ("document", "summary")),
        (["article", "highlights", "id"], {}, ("article", "highlights")),
        (["Source", "Target"], {}, ("Source", "Target")),
        (["question", "answer", "document", "summary"], {"source_column_name": "question"}, ("question", "answer")),
        (["a", "b"], {"source_column_name": "b", "target_column_name": "a"}, ("b", "a")),
    ],
)
def test_columns_are_found_by_their_usual_names_or_as_flags_say(
    names: list[str], flags: dict[str, str], found: tuple[str, str]
) -> None:
    columns = find_pair(names, PairArguments(**flags), "the train data", True)
    assert (*columns.text, columns.label) == found
    assert set(columns.others) == set(names) - set(found)


@pytest.mark.parametrize(
    ("names", "flags", "said"),
    [
        (["a", "b"], {}, "no two columns with known names .*; it has a, b. Name it with --source_column_name"),
        (["a", "b"], {"source_column_name": "a"}, "Name it with --target_column_name"),
        (["a", "b"], {"source_column_name": "c"}, "no column 'c'"),
        (["a", "b"], {"source_column_name": "a", "target_column_name": "a"}, "cannot be source and target"),
        (["messages"], {}, "Conversations are for recipes/causal_lm.py"),
    ],
)
def test_columns_that_cannot_be_told_are_refused(names: list[str], flags: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        find_pair(names, PairArguments(**flags), "the train data", True)


def cleaned(rows: dict[str, list[Any]], split: str = "train", skip: bool = False, **flags: Any) -> Any:
    cut = PreparationArguments(skip_bad_rows=skip)
    return clean_pairs({split: Dataset.from_dict(rows)}, PairArguments(**flags), cut, seed=0)


def test_an_empty_side_is_refused_or_left_out() -> None:
    rows = {"source": ["a", " ", "c", "d"], "target": ["e", "f", None, "d"]}
    with pytest.raises(RequestError, match=r"2 of 4 pairs with an empty side .*: 2, 3\)"):
        cleaned(rows)
    found = cleaned(rows, skip=True)
    assert found.skipped == {"train": 2}
    assert sorted(found.splits["train"]["source"][:] + found.splits["validation"]["source"][:]) == ["a", "d"]
    assert "1 training pairs have the same text on both sides" in found.notes


def test_a_test_split_may_lack_its_targets_and_keeps_its_rows() -> None:
    found = cleaned({"source": ["a", "", "c"], "target": ["", "", ""]}, split="test", skip=True)
    assert found.splits["test"].column_names == ["source", "row"]
    assert found.splits["test"]["row"][:] == [0, 2]


def test_translations_are_read_in_the_direction_that_is_asked_for() -> None:
    rows = {"translation": [{"de": "ja", "en": "yes"}, {"de": "nein", "en": "no"}]}
    found = cleaned(rows, split="test", source_lang="en_XX", target_lang="de_DE").splits["test"]
    assert (found["source"][:], found["target"][:]) == (["yes", "no"], ["ja", "nein"])
    with pytest.raises(RequestError, match=r"translations of de, en\. Name the language .* --source_lang"):
        cleaned(rows, source_lang="en", target_lang="fr")


@pytest.mark.parametrize("flags", [{"source_lang": "en"}, {"target_lang": "de"}])
def test_languages_that_neither_columns_nor_tokenizer_know_are_refused(flags: dict[str, str]) -> None:
    rows = Dataset.from_dict({"source": ["a", "b"], "target": ["c", "d"]})
    with pytest.raises(RequestError, match=f"^--{next(iter(flags))}: has no effect, because the data has no column"):
        cleaned(rows.to_dict(), split="test", **flags)
    arguments = PairArguments(**flags)
    clean_pairs({"test": rows}, arguments, PreparationArguments(), seed=0, has_languages=True)
    translations = {"translation": [{"de": "ja", "en": "yes"}], "source": ["a"], "target": ["b"]}
    with pytest.raises(RequestError, match="has no effect, because columns are chosen by name"):
        cleaned(translations, split="test", source_column_name="source", **flags)


def test_sides_are_cut_apart_with_their_end_and_counted() -> None:
    tokenizer = train_tokenizer(iter(["abcdef"]), 259, 64)
    arguments = PairArguments(max_target_length=4, source_prefix="x")
    encode = partial(encode_pairs, arguments, tokenizer, cleaned({"source": ["a"] * 3, "target": ["b"] * 3}).columns, 6)
    made = encode({"source": ["abcd", "abcde"], "target": ["abc", "abcd"]})
    assert made["source_cut"] == [False, True]
    assert made["target_cut"] == [False, True]
    assert [len(ids) for ids in made["input_ids"]] == [6, 6]
    assert {ids[-1] for ids in (*made["input_ids"], *made["labels"])} == {tokenizer.eos_token_id}
    assert tokenizer.decode(made["input_ids"][1], skip_special_tokens=True) == "xabcd"
    assert made["length"] == [10, 10]


def test_the_tokenizer_gives_every_text_back() -> None:
    tokenizer = train_tokenizer(iter(["def f(x):\n    return x"]), 300, 64)
    for text in ("def f(x):\n    return  x ", "Größe 数"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_built_in_functions_are_held_out_whole() -> None:
    splits = function_rows()
    train, held_out = ({name: set(split[name]) for name in split} for split in (splits["train"], splits["validation"]))
    assert len(splits["train"]["source"]) > 3000
    assert 200 < len(splits["validation"]["source"]) < 0.2 * len(splits["train"]["source"])
    assert not train["source"] & held_out["source"]
    assert not train["target"] & held_out["target"]
    for source, target in zip(splits["train"]["source"][:200], splits["train"]["target"][:200], strict=True):
        assert source.startswith(("def ", "async def "))
        assert f'"""{target}' not in source
