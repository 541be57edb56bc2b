"""Documents for language modelling: where they come from, and which of them are held out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from finetune.data.builtin import manual_topics
from finetune.data.charset import UTF8, as_utf8, encoding_notes
from finetune.data.columns import TEXT, said_columns
from finetune.data.files import TEXT_FILES, open_file, open_hub
from finetune.data.find_columns import find_document_columns
from finetune.data.streaming import is_drawn
from finetune.errors import RequestError
from finetune.safe_read.files import open_plain

PIECE_CHARACTERS = 1 << 14  # a text file is read and tokenized in pieces of about this size, cut at line ends
HELD_OUT_DOCUMENTS = 1_000  # of a stream, where --max_eval_samples does not say

ENDS = "__ends__"  # a column of our own: false where a document goes on in the next row


@dataclass(frozen=True)
class Corpus:
    """Rows of one kind: `text` (with `__ends__`, false where a document goes on in the next row), `messages`, or
    `prompt` and `completion`. `source` says where they come from. `train` of a stream is an IterableDataset."""

    kind: str
    train: Any
    validation: Dataset
    source: str
    was_held_out: bool  # `validation` is a part of the same text
    columns: str  # which are read, and which are not; nothing of a single text
    notes: tuple[str, ...]  # what else there is to say


def open_corpus(arguments: Any, seed: int) -> Corpus:
    """The training and the held-out documents. Raises RequestError."""
    given, encoding = None, arguments.encoding
    if arguments.validation_file:
        given = _open("validation_file", arguments.validation_file, encoding)
    if arguments.dataset_name:
        name, config = arguments.dataset_name, arguments.dataset_config_name
        train = open_hub(name, config, "train", arguments.streaming)
        held_out = open_hub(name, config, "validation", arguments.streaming) if given is None else given
        if train is None:
            raise RequestError(f"--dataset_name {name}: has no train split.")
        source = " ".join(filter(None, (name, config)))
    elif arguments.train_file:
        train = _open("train_file", arguments.train_file, encoding, arguments.streaming)
        held_out = given
        source = Path(arguments.train_file).name
    elif given is not None:
        train = held_out = given  # to evaluate alone
        source = Path(arguments.validation_file).name
    else:
        train, held_out = Dataset.from_dict({"text": manual_topics()}), None
        source = "built-in reference manual of Python"
    kind, train, columns = _settle(train, arguments.text_column_name, "the training data")
    was_held_out = held_out is None
    most, percentage = arguments.max_eval_samples, arguments.validation_split_percentage
    if held_out is not None:
        other, held_out, _ = _settle(held_out, arguments.text_column_name, "the validation data")
        if other != kind:
            raise RequestError(f"the training data has {kind}, but the validation data has {other}. Give both alike.")
        if isinstance(held_out, IterableDataset):
            held_out = Dataset.from_list(list(held_out.take(most or HELD_OUT_DOCUMENTS)))
    else:
        if arguments.streaming:
            train, held_out = _draw_from_stream(train, percentage, most or HELD_OUT_DOCUMENTS, seed)
        else:
            train, held_out = _hold_out(train, percentage, seed)
    train, held_out = _first(train, arguments.max_train_samples), _first(held_out, most)
    notes = encoding_notes(arguments, ("train", "validation"))
    return Corpus(kind, train, held_out, source, was_held_out, columns, notes)


def _first(documents: Any, most: int | None) -> Any:
    if not most:
        return documents
    is_stream = isinstance(documents, IterableDataset)
    return documents.take(most) if is_stream else documents.select(range(min(most, len(documents))))


def _open(flag: str, name: str, encoding: str | None, streaming: bool = False) -> Any:
    path = Path(name).expanduser()
    if path.suffix.lower() not in TEXT_FILES:
        return open_file(flag, name, streaming, encoding=encoding)
    if not path.is_file():
        raise RequestError(f"--{flag} {name}: there is no such file. Check the path.")
    open_plain(path, name=f"--{flag} {name}").close()
    path = as_utf8(flag, name, encoding, streaming)
    with path.open(encoding=UTF8) as file:
        if not file.read(1):
            raise RequestError(f"--{flag} {name}: the file is empty.")
    kind = IterableDataset if streaming else Dataset
    return kind.from_generator(_pieces_of, gen_kwargs={"path": str(path), "state": path.stat().st_mtime_ns})


def _pieces_of(path: str, state: int) -> Iterator[dict[str, Any]]:
    """One text file as one document, in pieces. `state` is there for the library's cache, which keeps what it made."""
    with open(path, encoding=UTF8) as file:  # any line end becomes a newline
        piece = _read_piece(file)
        while piece:
            following = _read_piece(file)
            yield {"text": piece, ENDS: not following}
            piece = following


def _read_piece(file: Any) -> str:
    """Up to a line end, unless the line is a very long one."""
    return str(file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS))


def _settle(table: Any, column: str | None, where: str) -> tuple[str, Any, str]:
    """The kind, the documents with these columns alone, and which they are in words; nothing of a single text."""
    names = _names(table)
    kind, read = find_document_columns(names, table, column, where)
    said = said_columns({"text": read}, [name for name in names if name not in read])
    if kind != TEXT:
        return kind, table.select_columns(list(read)), said
    (found,) = read
    table = table.select_columns([found, *([ENDS] if ENDS in names else [])])
    table = table.rename_column(found, "text") if found != "text" else table
    if ENDS in names:
        return TEXT, table, ""
    table = table.filter(_has_words, input_columns="text", batched=True)
    if isinstance(table, Dataset) and not len(table):
        raise RequestError(f"{where}: every document is empty. Check the file.")
    return TEXT, table, said


def _names(table: Any) -> list[str]:
    return table.column_names or list(next(iter(table)))  # a stream may have to be looked into


def _has_words(texts: list[str | None]) -> list[bool]:
    return [bool(text and text.strip()) for text in texts]


def _draw_from_stream(stream: Any, percentage: float, most: int, seed: int) -> tuple[Any, Dataset]:
    """A seeded hash of what they say draws documents, until there are `most` or the stream ends; the others train."""
    if ENDS in next(iter(stream)):
        raise RequestError("--streaming: of a single text nothing is held out. Add --validation_file.")
    drawn: dict[int, dict[str, Any]] = {}
    for row in stream:
        number = _number_of(row)
        if is_drawn(number, seed, percentage / 100):
            drawn[number] = row
        if len(drawn) == most:
            break
    if not drawn:
        raise RequestError("the stream has too few documents to hold any out. Add --validation_file, or documents.")
    return stream.filter(lambda row: _number_of(row) not in drawn), Dataset.from_list(list(drawn.values()))


def _number_of(row: dict[str, Any]) -> int:
    """A number for what a row says: its place in the stream changes when files are shuffled."""
    return zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode())


def _hold_out(table: Dataset, percentage: float, seed: int) -> tuple[Dataset, Dataset]:
    """A seeded choice of documents; of a single text, its end."""
    if ENDS in table.column_names:
        return _cut_text(table, percentage)
    if len(table) < 2:
        raise RequestError("there is one document, and none can be held out. Add --validation_file.")
    order = np.random.default_rng(seed).permutation(len(table))
    held_out = max(1, round(len(table) * percentage / 100))
    return table.select(np.sort(order[held_out:])), table.select(np.sort(order[:held_out]))


def _cut_text(table: Dataset, percentage: float) -> tuple[Dataset, Dataset]:
    """The last so many per cent of the characters are held out, as nanoGPT does (data/shakespeare_char/prepare.py)."""
    sizes = np.cumsum([len(text) for text in table["text"]])  # read row by row, never held
    cut = int(sizes[-1] * (1 - percentage / 100))
    row = int(np.searchsorted(sizes, cut, side="right"))
    inside = cut - (int(sizes[row - 1]) if row else 0)
    text = table[row]["text"]
    if not 0 < cut < sizes[-1]:
        raise RequestError("the text is too short to hold some of it out. Add --validation_file, or text.")
    before, after = table.select(list(range(row))), table.select(list(range(row + 1, len(table))))
    if not inside:  # the cut falls between two pieces
        before, text_before = before.select(list(range(row - 1))), before[-1]["text"]
    train = [before, _piece(text[:inside] if inside else text_before, True)]
    return concatenate_datasets(train), concatenate_datasets([_piece(text[inside:], not len(after)), after])


def _piece(text: str, ends: bool) -> Dataset:
    return Dataset.from_dict({"text": [text], ENDS: [ends]})
