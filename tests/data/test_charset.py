"""Files of other encodings than UTF-8 are read as what they are, and refused where nobody can tell."""

# ruff: noqa: RUF001  (letters of other alphabets are what this is about)

from __future__ import annotations

import codecs
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.charset import PIECE, as_utf8, encoding_notes
from finetune.data.documents import open_corpus
from finetune.data.streaming import TextStream, open_stream, survey
from finetune.data.tables import load_tables
from finetune.data.token_labels import load_sentences
from finetune.errors import RequestError, RunError
from finetune.run.flags.language import CorpusArguments
from finetune.run.flags.text import DataArguments, PreparationArguments, TokenDataArguments

WESTERN = ["Das schöne Café – für 5 €", "déjà vu à Noël", "El niño “añade” más"]
RUSSIAN = ["Привет, как дела", "Сегодня хорошая погода", "До свидания"]
CHINESE = ["今天天气很好", "我喜欢读书", "再见"]
POLISH = ["Zażółć gęślą jaźń", "łódź", "pięćdziesiąt złotych"]
TURKISH = ["ışık ve gölge", "şeker gibi bir çocuk", "yağmur yağıyor"]


@pytest.mark.parametrize("at", [0, 250, 500])
def test_a_byte_that_is_wrong_makes_no_other_encoding_of_a_file(at: int, tmp_path: Path) -> None:
    rows = [f"déjà vu à Noël {i}".encode() for i in range(500)]
    rows.insert(at, b"caf\xe9 et th\xe9")
    (tmp_path / "a.txt").write_bytes(b"\n".join(rows))
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        as_utf8("train_file", str(tmp_path / "a.txt"), None)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def as_csv(texts: list[str]) -> str:
    made = io.StringIO()
    csv.writer(made).writerows([("text", "label"), *((text, i % 2) for i, text in enumerate(texts))])
    return made.getvalue()


def as_jsonl(texts: list[str]) -> str:
    return "".join(
        json.dumps({"text": text, "label": i % 2}, ensure_ascii=False) + "\n" for i, text in enumerate(texts)
    )


FOUND = [
    pytest.param("cp1252", WESTERN, "cp1252", id="Windows"),
    pytest.param("latin-1", ["déjà vu à Noël", "El niño añade más"], "cp1252", id="Latin-1, a part of Windows-1252"),
    pytest.param("utf-16", RUSSIAN, "utf-16", id="UTF-16, as Excel's Unicode text"),
    pytest.param("utf-16-le", WESTERN, "utf-16-le", id="without a mark"),
    pytest.param("utf-16-be", WESTERN, "utf-16-be", id="without a mark, the other way round"),
    pytest.param("utf-32", CHINESE, "utf-32", id="UTF-32"),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("encoding", "texts", "found"), FOUND)
@pytest.mark.parametrize(("suffix", "write"), [(".csv", as_csv), (".jsonl", as_jsonl)])
def test_tables_are_read_as_what_their_bytes_show_and_that_is_said(
    encoding: str, texts: list[str], found: str, suffix: str, write: Any, streaming: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(write(texts).encode(encoding))
    arguments = DataArguments(train_file=str(path), streaming=streaming)
    rows = open_stream(arguments) if streaming else load_tables(arguments)[0]["train"]
    assert [row["text"] for row in rows] == texts
    assert encoding_notes(arguments, ("train", "validation")) == (
        f"rows{suffix} read as {found} (--encoding overrides this)",
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("encoding", "texts", "found"), FOUND)
def test_a_text_file_is_read_likewise(
    encoding: str, texts: list[str], found: str, streaming: bool, tmp_path: Path
) -> None:
    path, text = tmp_path / "book.txt", "\n".join(texts * 40)
    path.write_bytes(text.encode(encoding))
    kept = tmp_path / "held.txt"
    kept.write_text(text, encoding="utf-8")
    corpus = open_corpus(CorpusArguments(train_file=str(path), validation_file=str(kept), streaming=streaming), seed=1)
    assert "".join(row["text"] for row in corpus.train) == text
    assert corpus.notes == (f"book.txt read as {found} (--encoding overrides this)",)


def test_tagged_words_are_read_likewise(tmp_path: Path) -> None:
    path = tmp_path / "words.conll"
    path.write_bytes("Zoë B-person\nlacht O\n\nEs O\n".encode("cp1252"))
    tables, _ = load_sentences(TokenDataArguments(train_file=str(path)))
    assert tables["train"]["tokens"][:] == [["Zoë", "lacht"], ["Es"]]


@pytest.mark.parametrize(
    ("encoding", "texts"),
    [("cp1251", RUSSIAN), ("koi8-r", RUSSIAN), ("gb18030", CHINESE), ("cp1250", POLISH), ("cp1254", TURKISH),
     ("shift_jis", ["日本語のテキスト", "さようなら"]), ("big5", ["今天天氣很好"]), ("mac-roman", WESTERN)],
)  # fmt: skip
def test_what_bytes_do_not_show_is_asked_for_and_then_read(encoding: str, texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(as_csv(texts).encode(encoding))
    with pytest.raises(RequestError, match=r"--train_file .*rows\.csv: is not UTF-8 .*Set --encoding"):
        load_tables(DataArguments(train_file=str(path)))
    arguments = DataArguments(train_file=str(path), encoding=encoding)
    assert load_tables(arguments)[0]["train"]["text"][:] == texts
    assert encoding_notes(arguments, ("train",)) == ()


def test_bytes_that_are_not_of_the_encoding_that_was_said_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(as_csv(RUSSIAN).encode("cp1251"))
    for said in ("utf-8", "gb18030", "ascii"):
        with pytest.raises(RequestError, match=r"--train_file .*rows\.csv: is not .*--encoding"):
            load_tables(DataArguments(train_file=str(path), encoding=said))


def test_utf_8_is_read_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for mark in (b"", codecs.BOM_UTF8):
        path.write_bytes(mark + as_csv(CHINESE).encode())
        for said in (None, "utf8", "UTF-8", "utf-8-sig"):
            assert as_utf8("train_file", str(path), said) == path
        tables, _ = load_tables(DataArguments(train_file=str(path)))
        assert tables["train"].column_names == ["text", "label"]
    assert not (tmp_path / "cache" / "utf-8").exists()


def test_a_mark_is_no_letter_whatever_is_said_of_the_order_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for said, mark in (("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE), ("utf-16", b"")):
        path.write_bytes(mark + as_csv(WESTERN).encode(said))
        tables, _ = load_tables(DataArguments(train_file=str(path), encoding=said))
        assert tables["train"].column_names == ["text", "label"]


def test_an_error_names_the_file_that_was_given_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(('{"text": "é", "label": 1}\n' * 3 + '{"text": é}\n').encode("cp1252"))
    with pytest.raises(RequestError, match=rf"--train_file {path}: line 4, column"):
        load_tables(DataArguments(train_file=str(path)))


def test_a_stream_that_is_another_further_on_says_so(tmp_path: Path) -> None:
    rows = [(f"plain words {i} {'x' * 100}", i % 2) for i in range(2 * PIECE // 100)]
    path = tmp_path / "rows.csv"
    plain = "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    path.write_bytes((plain + "à la fin,1\n").encode("cp1252"))
    arguments = DataArguments(train_file=str(path), streaming=True)
    with pytest.raises(RequestError, match=r"the stream is not UTF-8 to its end .*--encoding"):
        survey(arguments, PreparationArguments(), False, 1, None)
    told = DataArguments(train_file=str(path), streaming=True, encoding="cp1252")
    found = survey(told, PreparationArguments(), False, 1, None)
    assert found.rows + found.held_out == len(rows) + 1
    with pytest.raises(RunError, match="the stream is not UTF-8 to its end"):
        list(TextStream(arguments, found, 1))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "rows.csv",
            "text,label\n" + "plain words,1\n" * 20_000 + "a, b,1\n",
            "line 20002 has 3 cells",
        ),
        ("rows.jsonl", '{"text": "a b", "label": 1}\n' * 500_000 + '{"text": "a",\n', "JSON parse error"),
    ],
)
def test_a_stream_that_is_broken_further_on_says_where(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RequestError, match=f"the stream cannot be read to its end: {said}"):
        survey(DataArguments(train_file=str(path), streaming=True), PreparationArguments(), False, 1, None)
