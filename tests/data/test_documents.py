"""Corpora from text files, tables and Python's own manual; what is held out; and the tokens that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data import documents
from finetune.data.causal_lm import BlockArguments, CorpusArguments, prepare_corpus
from finetune.data.packing import IGNORED
from finetune.data.tokenizer import train_text_tokenizer
from finetune.errors import RequestError


def prepared(tokenizer: Any = None, block_size: int = 16, blocks: dict[str, Any] | None = None, **flags: Any) -> Any:
    return prepare_corpus(
        CorpusArguments(**flags),
        BlockArguments(**(blocks or {})),
        tokenizer,
        block_size=block_size,
        seed=1,
        leads=True,
        reports=False,
    )


def text_of(data: Any, split: str) -> str:
    return data.tokenizer.decode(data.splits[split].tokens.ids.tolist())


@given(st.text(min_size=1))
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_tokenizer_from_scratch_gives_every_text_back(kind: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode() or "a"
    made = train_text_tokenizer(kind, [text, "some more words"], 300, 64, with_end=True)
    assert made.decode(made(text, add_special_tokens=False)["input_ids"]) == text


def test_a_character_tokenizer_of_one_text_has_its_characters_alone(tmp_path: Path) -> None:
    made = train_text_tokenizer("char", ["hello\n", "world"], 0, 64, with_end=False)
    assert len(made) == len(set("hello\nworld"))
    made.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path)("hold").input_ids == made("hold").input_ids


def test_a_text_file_is_one_document_and_its_end_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 50)  # so that the file has many pieces
    text = "".join(f"line {i} of the text\n" for i in range(60))
    path = tmp_path / "a.txt"
    path.write_text(text)
    data = prepared(train_file=str(path), validation_split_percentage=10)
    cut = int(len(text) * 0.9)
    assert (text_of(data, "train"), text_of(data, "validation")) == (text[:cut], text[cut:])
    assert data.account.documents == {"train": 1, "validation": 1}
    assert data.account.characters == {"train": cut, "validation": len(text) - cut}
    assert data.tokenizer.eos_token is None
    blocks = data.splits["train"]
    assert len(blocks) == (cut - 1) // 16
    assert data.account.left_over == (cut - 1) % 16


def test_rows_are_documents_joined_by_the_end_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document number {i}"}) + "\n" for i in range(20)))
    data = prepared(train_file=str(path), blocks={"tokenizer": "bpe", "packing": "bfd", "document_mask": True})
    assert data.account.documents == {"train": 18, "validation": 2}
    pieces = text_of(data, "train").split(data.tokenizer.eos_token)
    assert len(pieces) == 19
    assert not pieces[-1]
    assert "position_ids" in data.splits["train"][0]


def test_conversations_are_learnt_in_part(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Yes."}]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    tokenizer = train_text_tokenizer("byte", [], 0, 64, with_end=True)
    data = prepared(tokenizer, block_size=64, blocks={"packing": "none"}, train_file=str(path))
    labels = data.splits["train"][0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED].tolist()) == "Yes.\n"
    assert data.account.learnt["train"] == 3 * len("Yes.\n")


@pytest.mark.parametrize(
    ("content", "blocks", "message"),
    [
        ("a" * 30, {}, "has 27 tokens, less than one block of 64"),
        ("", {}, "is empty"),
        ("abc" * 60 + "\u00e9" * 20, {}, r"'é' \(U\+00E9\), which the training text lacks"),
        ("abc" * 60, {"packing": "tight"}, "--packing tight: give one of wrapped, bfd, none"),
        ("abc" * 60, {"tokenizer": "word"}, "--tokenizer word: give one of char, byte, bpe"),
    ],
    ids=["shorter than a block", "empty", "unknown character", "unknown packing", "unknown tokenizer"],
)
def test_bad_corpora_are_refused(content: str, blocks: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        prepared(block_size=64, blocks=blocks, train_file=str(path))


def test_a_table_without_text_lists_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("price,size\n1,2\n3,4\n")
    with pytest.raises(RequestError, match=r"it has price, size\. Name one by --text_column_name"):
        prepared(train_file=str(path))


def test_the_manual_is_there_on_every_python() -> None:
    data = prepared(block_size=128)
    assert data.account.tokens["train"] > 300_000
    assert data.account.documents["validation"] >= 5
