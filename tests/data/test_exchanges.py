"""What is asked and answered last, by tokens and by which of them are learnt."""

from __future__ import annotations

import numpy as np

from finetune.data.mixture import Joined
from finetune.data.packing import PackedDataset, Tokens, one_each
from finetune.generation.causal import exchanges_of


def split_of(*documents: str) -> PackedDataset:
    """Each character a token; those in upper case are learnt."""
    text = "".join(documents)
    starts = np.cumsum([0, *map(len, documents)])
    tokens = Tokens(np.array([ord(one) for one in text]), starts, np.array([one.isupper() for one in text]))
    return PackedDataset(tokens, one_each(starts, 64), False)


def texts(rows: list[list[int]]) -> list[str]:
    return ["".join(map(chr, row)) for row in rows]


def test_the_last_learnt_run_is_the_answer_and_all_before_it_the_prompt() -> None:
    found = exchanges_of(split_of("abCDefGH", "abC", "abCd."))
    assert texts(found.prompts) == ["abCDef", "ab", "ab"]
    assert texts(found.answers) == ["GH", "C", "C"]
    assert (found.numbers, found.documents) == ([0, 1, 2], 3)


def test_a_document_without_an_answer_or_without_a_question_is_left_out_and_keeps_its_number() -> None:
    found = exchanges_of(split_of("abc", "ABC", "aB"))
    assert (found.numbers, texts(found.answers), found.documents) == ([2], ["B"], 3)


def test_documents_of_several_files_are_numbered_through() -> None:
    found = exchanges_of(Joined([split_of("aB", "c"), split_of("dE")]))
    assert (found.numbers, texts(found.prompts), found.documents) == ([0, 2], ["a", "d"], 3)
