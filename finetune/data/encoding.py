"""Tokenizes documents: tables in parallel and piece by piece to disk; streams batch by batch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Features, List, Value

from finetune.data.chat.conversation import Learning, completion, conversation
from finetune.data.chat.remarks import REMARKS
from finetune.data.chat.templates import AT_A_TIME, each_rendered
from finetune.data.columns import CHAT, TEXT
from finetune.data.documents import ENDS
from finetune.data.formats import Format
from finetune.data.packing import TokenWriter, dtype_of
from finetune.data.places import NUMBER, Place
from finetune.data.tokenizer import beginning_of, begun, letters_of, rows_of
from finetune.errors import RequestError

MANY_ROWS, MANY_BYTES = 2_000, 8 << 20
MOST_CHARACTERS = 1 << 20
BATCH_ROWS = 64  # about 1 MiB of text at a time, with rows of documents.PIECE_CHARACTERS


class Encoder:
    """Encodes rows of a format to columns `ids`, `learnt` (a boolean per id; absent for plain text, which is all
    trained on), `ends`, `characters` and `bytes` of the trained text, and `remarks` on conversations (chat/remarks.py).

    A class, so that it can be passed to the tokenizing processes.
    """

    def __init__(
        self, tokenizer: Any, form: Format, learning: Learning | None = None, place: Place | None = None
    ) -> None:
        self.tokenizer, self.form, self.learning, self.place = tokenizer, form, learning, place
        self.letters, self.beginning = letters_of(tokenizer), beginning_of(tokenizer)
        self.dtype = dtype_of(rows_of(tokenizer))

    def __call__(self, rows: dict[str, list[Any]], numbers: Sequence[int] = ()) -> dict[str, list[Any]]:
        """`numbers` are the rows' positions in their table: of a text in pieces, only row 0 gets the start tokens.
        Raises RequestError for a malformed row, saying where it is and quoting it."""
        return self._text(rows, numbers) if self.form.kind == TEXT else self._turns(rows)

    def _text(self, rows: dict[str, list[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        texts = rows["text"]
        for text in texts:
            refuse_unknown_characters(self.letters, text, "the text")
        ends = rows.get(ENDS, [True] * len(texts))
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = self._ids(texts)
        for i in [i for i, number in enumerate(numbers) if number == 0] if ENDS in rows else range(len(ids)):
            ids[i] = begun(ids[i], self.beginning)
        return {
            "ids": [np.array([*row, *end] if last else row, self.dtype) for row, last in zip(ids, ends, strict=True)],
            "ends": ends,
            "characters": [len(text) for text in texts],
            "bytes": [len(text.encode()) for text in texts],
        }

    def _ids(self, texts: list[str]) -> list[list[int]]:
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return list(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
        # Like the call above, but computes only the ids, in half the time and memory.
        backend.no_truncation()  # a tokenizer.json may set both
        backend.no_padding()
        ids: list[list[int]] = []
        for some in _by_size(texts):
            ids += [encoded.ids for encoded in backend.encode_batch_fast(some, add_special_tokens=False)]
        return ids

    def _turns(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        every = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        made = each_rendered(self._encoded, every, self.tokenizer.chat_template if self.form.kind == CHAT else None)
        texts = [
            self.tokenizer.decode([i for i, used in zip(ids, learnt, strict=True) if used], skip_special_tokens=True)
            for ids, learnt, _ in made
        ]
        return {
            "ids": [ids for ids, _, _ in made],
            "learnt": [learnt for _, learnt, _ in made],
            "ends": [True] * len(made),
            "characters": [len(text) for text in texts],
            "bytes": [len(text.encode()) for text in texts],
            "remarks": [remarks for _, _, remarks in made],
        }

    def _encoded(self, row: dict[str, Any]) -> Any:
        try:
            if self.form.kind == CHAT:
                return conversation(self.tokenizer, *self.form.conversation(row), self.learning)
            return completion(self.tokenizer, row["prompt"], row["completion"], self.beginning, self.learning)
        except RequestError as error:
            if self.place is None:
                raise
            raise RequestError(f"{self.place.of(row.get(NUMBER))}: {error}") from error


def _by_size(texts: list[str]) -> Iterator[list[str]]:
    """Groups texts to about MOST_CHARACTERS: the tokenizer takes a hundred bytes per character while it works."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= MOST_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some


def write_tokens(folder: Path, table: Any, encoder: Encoder, workers: int) -> tuple[dict[str, int], list[int]]:
    """Tokenizes a table into `folder` in `workers` processes, never entirely in memory. Returns counts by name, and how
    many conversations each of the REMARKS applies to."""
    dtype, kind = encoder.dtype, encoder.form.kind
    features = {"ids": List(Value(dtype)), "ends": Value("bool"), "characters": Value("int64"), "bytes": Value("int64")}
    if kind != TEXT:
        features |= {"learnt": List(Value("bool")), "remarks": List(Value("int64"))}
    scratch = folder / "encoded"
    scratch.mkdir()
    encoded = table.map(
        encoder,
        with_indices=True,
        batched=True,
        batch_size=AT_A_TIME if kind == CHAT else BATCH_ROWS,
        writer_batch_size=BATCH_ROWS,
        num_proc=min(workers, len(table)) if workers > 1 and _is_large(table) else None,
        remove_columns=table.column_names,
        features=Features(features),
        cache_file_name=str(scratch / "rows.arrow"),  # the library's own cache would keep it
        desc="tokenizing",
    )
    writer = TokenWriter(folder, dtype)
    counts = {"characters": 0, "bytes": 0, "learnt": 0}
    remarks: npt.NDArray[np.int64] = np.zeros(len(REMARKS), dtype=np.int64)
    for rows in encoded.with_format("arrow").iter(BATCH_ROWS):
        ids = rows["ids"].combine_chunks()
        learnt = rows["learnt"].combine_chunks().flatten().to_numpy(zero_copy_only=False) if kind != TEXT else None
        flat = ids.flatten().to_numpy()
        writer.add(flat, ids.value_lengths().to_numpy(), rows["ends"].to_numpy(), learnt)
        counts["learnt"] += len(flat) if learnt is None else int(np.count_nonzero(learnt))
        if kind == CHAT:
            remarks += rows["remarks"].combine_chunks().flatten().to_numpy().reshape(-1, len(REMARKS)).sum(0)
        for name in ("characters", "bytes"):
            counts[name] += int(rows[name].to_numpy().sum())
    writer.close()
    shutil.rmtree(scratch)
    return {**counts, "documents": len(writer.starts) - 1, "tokens": writer.written}, remarks.tolist()


def _is_large(table: Any) -> bool:
    """Whether starting processes pays off: it takes a second or two."""
    return len(table) > MANY_ROWS or (table.data.nbytes or 0) > MANY_BYTES


class UnknownCharacterError(RequestError):
    """A text has a character that the character tokenizer lacks."""


def refuse_unknown_characters(letters: frozenset[str] | None, text: str, where: str) -> None:
    """Raises UnknownCharacterError for a character that is not in a character tokenizer's `letters` (None for other
    tokenizers): it would be dropped silently."""
    if letters is None or letters.issuperset(text):
        return
    place = next(i for i, character in enumerate(text) if character not in letters)
    near = text[max(0, place - 20) : place + 20]
    raise UnknownCharacterError(
        f"{where} has {text[place]!r} (U+{ord(text[place]):04X}) in {near!r}, for which the character tokenizer has no "
        "token: its training text lacks it. Fix the text, or when training from scratch use --tokenizer byte or bpe."
    )
