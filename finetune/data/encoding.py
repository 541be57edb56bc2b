"""Documents to token ids: for a table, on all cores and piece by piece onto the disk; for a stream, batch by batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Features, List, Value

from finetune.data.chat import completion, conversation
from finetune.data.documents import CHAT, TEXT
from finetune.data.packing import TokenWriter, dtype_of
from finetune.data.tokenizer import letters_of
from finetune.errors import RequestError

BATCH_ROWS = 64  # with rows of documents.PIECE_CHARACTERS about 1 MiB of text at a time


class Encoder:
    """Rows of text, conversations, or prompts with completions, to columns `ids`, `learnt` (a truth value for each id;
    not for plain text, of which all is learnt), `ends`, and `characters` and `bytes` of what is learnt.

    A class, for the processes that tokenize must be handed it.
    """

    def __init__(self, tokenizer: Any, kind: str) -> None:
        self.tokenizer, self.kind = tokenizer, kind
        self.letters = letters_of(tokenizer)
        self.dtype = dtype_of(len(tokenizer))

    def __call__(self, rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        """`numbers` are those of the rows, from 0, for messages. Raises RequestError for a row that cannot be."""
        return self._text(rows, numbers) if self.kind == TEXT else self._turns(rows, numbers)

    def _text(self, rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        texts = rows["text"]
        for text, number in zip(texts, numbers, strict=True):
            refuse_unknown_characters(self.letters, text, f"document {number + 1}")
        ends = rows.get("ends", [True] * len(texts))
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = self._ids(texts)
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
        # As the call above, in half the time and memory: nothing but the ids is made.
        backend.no_truncation()  # a tokenizer.json may bring both
        backend.no_padding()
        return [encoded.ids for encoded in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _turns(self, rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        if self.kind == CHAT:
            made = [conversation(self.tokenizer, m, n + 1) for m, n in zip(rows["messages"], numbers, strict=True)]
        else:
            made = [completion(self.tokenizer, p, c) for p, c in zip(rows["prompt"], rows["completion"], strict=True)]
        texts = [
            self.tokenizer.decode([i for i, used in zip(ids, learnt, strict=True) if used], skip_special_tokens=True)
            for ids, learnt in made
        ]
        return {
            "ids": [ids for ids, _ in made],
            "learnt": [learnt for _, learnt in made],
            "ends": [True] * len(made),
            "characters": [len(text) for text in texts],
            "bytes": [len(text.encode()) for text in texts],
        }


def write_tokens(folder: Path, table: Any, kind: str, tokenizer: Any, workers: int) -> dict[str, int]:
    """Tokenize a table into `folder`, by `workers` processes and never whole in memory; what it counted, by name."""
    dtype = dtype_of(len(tokenizer))
    features = {"ids": List(Value(dtype)), "ends": Value("bool"), "characters": Value("int64"), "bytes": Value("int64")}
    if kind != TEXT:
        features["learnt"] = List(Value("bool"))
    scratch = folder / "encoded"
    scratch.mkdir()
    encoded = table.map(
        Encoder(tokenizer, kind),
        batched=True,
        batch_size=BATCH_ROWS,
        writer_batch_size=BATCH_ROWS,
        with_indices=True,
        num_proc=workers if workers > 1 and len(table) > 2 * BATCH_ROWS * workers else None,
        remove_columns=table.column_names,
        features=Features(features),
        cache_file_name=str(scratch / "rows.arrow"),  # not the library's own cache, where it would stay
        desc="tokenizing",
    )
    writer = TokenWriter(folder, dtype)
    counts = {"characters": 0, "bytes": 0, "learnt": 0}
    for rows in encoded.with_format("arrow").iter(BATCH_ROWS):
        ids = rows["ids"].combine_chunks()
        learnt = rows["learnt"].combine_chunks().flatten().to_numpy(zero_copy_only=False) if kind != TEXT else None
        flat = ids.flatten().to_numpy()
        writer.add(flat, ids.value_lengths().to_numpy(), rows["ends"].to_numpy(), learnt)
        counts["learnt"] += len(flat) if learnt is None else int(np.count_nonzero(learnt))
        for name in ("characters", "bytes"):
            counts[name] += int(rows[name].to_numpy().sum())
    writer.close()
    shutil.rmtree(scratch)
    return {**counts, "documents": len(writer.starts) - 1, "tokens": writer.written}


def refuse_unknown_characters(letters: frozenset[str] | None, text: str, where: str) -> None:
    """Raises RequestError at a character that is none of a character tokenizer's `letters` (None for a tokenizer of
    another kind): it would be left out without a word."""
    if letters is None or letters.issuperset(text):
        return
    place = next(i for i, character in enumerate(text) if character not in letters)
    near = text[max(0, place - 20) : place + 20]
    raise RequestError(
        f"{where} has {text[place]!r} (U+{ord(text[place]):04X}) at character {place + 1:,} ({near!r}), for which the "
        "character tokenizer has no token: the text that it was made from lacks it. Use --tokenizer byte or bpe, or "
        "mend the text."
    )
