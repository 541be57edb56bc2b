"""Documents for language modeling: where they come from, and which are held out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from finetune.data.builtin import manual_topics
from finetune.data.charset import UTF8, as_utf8, encoding_notes
from finetune.data.column_names import check_mapped, renames_for
from finetune.data.columns import CHAT, TEXT, said_columns
from finetune.data.duplicates import find_duplicates
from finetune.data.files import TEXT_FILES, open_file, open_hub
from finetune.data.formats import Format, find_format
from finetune.data.places import NUMBER, Place
from finetune.data.streaming import is_drawn
from finetune.errors import RequestError
from finetune.run.mixture import parts_of
from finetune.safe_read.files import open_plain

PIECE_CHARACTERS = 1 << 14  # a text file is read and tokenized in pieces of about this size, cut at line ends
HELD_OUT_DOCUMENTS = 1_000  # of a stream, unless --max_eval_samples is given

ENDS = "__ends__"  # our own column: false if the document continues in the next row


@dataclass(frozen=True)
class Corpus:
    """Rows of one kind, with a format for each split. Text rows have `text` alone, plus `__ends__` (see ENDS) if files
    are read in pieces. `source` says where they come from. `train` is an IterableDataset when streaming."""

    kind: str
    train: Any
    validation: Dataset
    formats: dict[str, Format]  # by split
    places: dict[str, Place]
    source: str
    was_held_out: bool  # `validation` is part of the same text
    columns: str  # which are read, and which are ignored; empty for a plain text file
    column_names: tuple[str, ...]  # as in the file, if --column_mapping is given
    notes: tuple[str, ...]  # further remarks

    def words(self, split: str) -> Callable[[dict[str, Any]], str]:
        """A function that gives a row's text. A row it cannot render is reported later, by tokenizing."""

        def said(row: dict[str, Any]) -> str:
            try:
                return str(row["text"]) if self.kind == TEXT else self.formats[split].words(row)
            except RequestError:
                return repr(row)

        return said

    def nothing_learnt(self, split: str) -> str:
        """The error message for a split without trainable tokens."""
        if self.kind != CHAT:
            return f"the {split} data has nothing to learn: no text is left in it. Check the file."
        table = self.train if split == "train" else self.validation
        conversations = (self.formats[split].conversation(row)[0] for row in islice(table, 1000))
        roles = sorted({str(turn.get("role")) for turns in conversations for turn in turns})
        return (
            f"the {split} data has nothing to learn: only turns of role `assistant` are learned, and the roles here "
            f"are {', '.join(roles)}. Rename the model's role to `assistant`."
        )


def open_corpora(arguments: Any, seed: int) -> list[Corpus]:
    """The training and held-out documents, one corpus for each training file. Raises RequestError."""
    paths: list[str | None] = [part.path for part in parts_of(arguments.train_file)]
    found = [open_corpus(replace(arguments, train_file=path), seed, len(paths) < 2) for path in paths or [None]]
    if len(found) > 1:
        check_mapped(arguments.column_mapping, [one.column_names for one in found])
    if others := [one for one in found if one.kind != found[0].kind]:
        raise RequestError(
            f"{found[0].source} has {found[0].kind}, but {others[0].source} has {others[0].kind}. Mix only files of "
            "one kind: --column_mapping may convert them."
        )
    only_evaluates = bool(arguments.validation_file and not arguments.train_file and not arguments.dataset_name)
    is_compared = not arguments.streaming and not only_evaluates
    return _without_duplicates(found, arguments.drop_duplicates) if is_compared else found


def _without_duplicates(corpora: list[Corpus], drops: bool) -> list[Corpus]:
    """Compares documents across all files. Files that are read in pieces are not searched."""
    some = [one for one in corpora if ENDS not in one.train.column_names]
    held_out = [one for one in some if ENDS not in one.validation.column_names][
        : None if some and some[0].was_held_out else 1
    ]

    def words(corpus: Corpus, split: str) -> Iterator[str]:
        return map(corpus.words(split), corpus.train if split == "train" else corpus.validation)

    training = chain.from_iterable(words(one, "train") for one in some)
    found = find_duplicates(
        training, chain.from_iterable(words(one, "validation") for one in held_out), *([None] if drops else [])
    )
    note = found.note(sum(len(one.train) for one in some), sum(len(one.validation) for one in held_out), drops)
    if note:
        corpora = [replace(corpora[0], notes=(*corpora[0].notes, note)), *corpora[1:]]
    if not drops:
        return corpora
    kept, first = [], 0
    for one in corpora:
        if ENDS not in one.train.column_names:
            keep = np.flatnonzero(found.keep[first : first + len(one.train)])
            first += len(one.train)
            if not len(keep):
                raise RequestError(f"--drop_duplicates: nothing is left of {one.source}. Drop the flag, or the file.")
            one = replace(one, train=one.train.select(keep))
        kept.append(one)
    return kept


def open_corpus(arguments: Any, seed: int, is_alone: bool = True) -> Corpus:
    """Opens one file or data set, which may be one of several. Raises RequestError."""
    given, encoding = None, arguments.encoding
    if arguments.validation_file:
        given = _open("validation_file", arguments.validation_file, encoding)
    file, other = arguments.train_file or arguments.validation_file, arguments.validation_file
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
        train = held_out = given  # evaluation only
        source = Path(arguments.validation_file).name
    else:
        train, held_out = Dataset.from_dict({"text": manual_topics()}), None
        source = "built-in reference manual of Python"
    where = "the training data" if is_alone else f"the training data {source}"
    # Naming a stream's columns may read its first row.
    named = [table for table in (train, held_out) if table is not None and arguments.column_mapping]
    column_names = tuple(name for table in named for name in _names(table))
    if is_alone:
        check_mapped(arguments.column_mapping, [column_names])
    form, train, columns = _settle(train, arguments, where, is_alone)
    was_held_out = held_out is None
    places = dict.fromkeys(("train", "validation"), Place.of_file(file) if file else Place(source))
    formats = dict.fromkeys(places, form)
    most, percentage = arguments.max_eval_samples, arguments.validation_split_percentage
    if held_out is not None:
        formats["validation"], held_out, _ = _settle(held_out, arguments, "the validation data", is_alone)
        places["validation"] = Place.of_file(other) if other else Place(f"{source}, validation")
        if (kind := formats["validation"].kind) != form.kind:
            raise RequestError(
                f"the training data has {form.kind}, but the validation data has {kind}. Give both in the same format."
            )
        if isinstance(held_out, IterableDataset):
            held_out = Dataset.from_list(list(held_out.take(most or HELD_OUT_DOCUMENTS)))
    elif arguments.streaming:
        train, held_out = _draw_from_stream(train, percentage, most or HELD_OUT_DOCUMENTS, seed)
    else:
        train, held_out = _hold_out(train, percentage, seed)
    train, held_out = _first(train, arguments.max_train_samples), _first(held_out, most)
    notes = encoding_notes(arguments, ("train", "validation"))
    return Corpus(form.kind, train, held_out, formats, places, source, was_held_out, columns, column_names, notes)


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
    """Reads one text file as one document, in pieces. `state` only makes the datasets cache notice a changed file."""
    with open(path, encoding=UTF8) as file:  # universal newlines: every line end becomes \n
        piece = _read_piece(file)
        while piece:
            following = _read_piece(file)
            yield {"text": piece, ENDS: not following}
            piece = following


def _read_piece(file: Any) -> str:
    """Reads up to a line end, unless the line is very long."""
    return str(file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS))


def _settle(table: Any, arguments: Any, where: str, needs_all: bool) -> tuple[Format, Any, str]:
    """The format, the documents reduced to its columns, and a description of the columns, empty for a text file."""
    renames = renames_for(arguments.column_mapping, _names(table), arguments.text_column_name, where, needs_all)
    table = table.rename_columns(renames) if renames else table
    names, renamed = _names(table), {new: old for old, new in renames.items()}
    form = find_format(names, table, arguments.text_column_name, where)
    if form.kind != TEXT:
        said = form.describe(names, renamed, len(table) if isinstance(table, Dataset) else None)
        table = table.select_columns(list(form.columns))
        numbered = isinstance(table, Dataset)
        return form, table.add_column(NUMBER, np.arange(len(table))) if numbered else table, said
    (found,) = form.columns
    others = [renamed.get(name, name) for name in names if name != found]
    said = said_columns({"text": [renamed.get(found, found)]}, others)
    table = table.select_columns([found, *([ENDS] if ENDS in names else [])])
    table = table.rename_column(found, "text") if found != "text" else table
    if ENDS in names:
        return form, table, ""
    table = table.filter(_has_words, input_columns="text", batched=True)
    if isinstance(table, Dataset) and not len(table):
        raise RequestError(f"{where}: every document is empty. Check the file.")
    return form, table, said


def _names(table: Any) -> list[str]:
    return table.column_names or list(next(iter(table)))  # for some streams only the first row tells


def _has_words(texts: list[str | None]) -> list[bool]:
    return [bool(text and text.strip()) for text in texts]


def _draw_from_stream(stream: Any, percentage: float, most: int, seed: int) -> tuple[Any, Dataset]:
    """Holds out documents by a seeded hash of their content, until there are `most` or the stream ends."""
    if ENDS in next(iter(stream)):
        raise RequestError("--streaming: cannot hold out part of a single text. Add --validation_file.")
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
    """A hash of a row's content. Its position would not do: shuffling files changes it."""
    return zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode())


def _hold_out(table: Dataset, percentage: float, seed: int) -> tuple[Dataset, Dataset]:
    """A seeded choice of documents; for a single text, its end."""
    if ENDS in table.column_names:
        return _cut_text(table, percentage)
    if len(table) < 2:
        raise RequestError("there is only one document, so none can be held out. Add --validation_file.")
    order = np.random.default_rng(seed).permutation(len(table))
    held_out = max(1, round(len(table) * percentage / 100))
    return table.select(np.sort(order[held_out:])), table.select(np.sort(order[:held_out]))


def _cut_text(table: Dataset, percentage: float) -> tuple[Dataset, Dataset]:
    """Holds out the last `percentage` per cent of the characters, like nanoGPT (data/shakespeare_char/prepare.py)."""
    sizes = np.cumsum([len(text) for text in table["text"]])  # read row by row, never all in memory
    cut = int(sizes[-1] * (1 - percentage / 100))
    row = int(np.searchsorted(sizes, cut, side="right"))
    inside = cut - (int(sizes[row - 1]) if row else 0)
    text = table[row]["text"]
    if not 0 < cut < sizes[-1]:
        raise RequestError("the text is too short to hold out part of it. Add --validation_file, or more text.")
    before, after = table.select(list(range(row))), table.select(list(range(row + 1, len(table))))
    if not inside:  # the cut falls between two pieces
        before, text_before = before.select(list(range(row - 1))), before[-1]["text"]
    train = [before, _piece(text[:inside] if inside else text_before, True)]
    return concatenate_datasets(train), concatenate_datasets([_piece(text[inside:], not len(after)), after])


def _piece(text: str, ends: bool) -> Dataset:
    return Dataset.from_dict({"text": [text], ENDS: [ends]})
