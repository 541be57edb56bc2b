"""Texts to embed, as tokens, prepared once and cached: each row has an anchor, a positive and negatives; two texts with
a score; or one text with a label."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from finetune.data.classification import ClassificationData, Kind, Rows, prepare
from finetune.data.columns import WIDTHS, Columns, said_counts, said_data
from finetune.data.embedding_rows import (
    BUILT_IN,
    CLASSES,
    JUDGED,
    clean_rows,
    load_rows,
    said_rows,
    text_column,
    texts_of,
)
from finetune.data.packing import mask_of, padded
from finetune.data.tables import ROW
from finetune.data.tokenizer import cut_to
from finetune.run.recipes.embedding import EmbeddingDataArguments

IDS, KEYS = "ids", "keys"


@dataclass(frozen=True)
class EmbeddingData(ClassificationData):
    """Columns `ids` (the tokens of each of a row's texts), `keys` (equal for equal texts), `length` (of the longest
    text), and `judged` (a score or a label id). `labels.task` is PAIRS, SCORED or CLASSES."""

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        account, kind = self.account, self.labels.task
        cut = sum(account.truncated.values())
        labels = f"{len(self.labels.names)} labels: {said_counts(account.label_counts)}" if kind == CLASSES else ""
        too_long = f"{cut:,} rows with a text cut to {account.max_seq_length} tokens" if cut else ""
        return said_data(account, self.columns, kind, labels, too_long)

    @property
    def columns(self) -> str:
        """Which columns are read, and which are ignored; empty for the built-in data."""
        return "" if self.account.source == BUILT_IN else said_rows(self.account.columns, self.labels.task)

    @property
    def collator(self) -> Any:
        """Collates all first texts, then all second texts, and so on, padded on the right."""
        return partial(collate, self.pad)


def prepare_embedding(
    arguments: EmbeddingDataArguments, *rest: Any, prompts: Mapping[str, str], **more: Any
) -> EmbeddingData:
    """As `finetune.data.classification.prepare`; `prompts` are put before a "query", a row's first
    text, and before a "document"."""
    settled = replace(arguments, query_prompt=prompts.get("query"), document_prompt=prompts.get("document"))
    clean = partial(clean_rows, said_prompt=arguments.document_prompt)
    kind = Kind(
        "embedding", load_rows, clean, partial(encode, settled), texts_of, EmbeddingData, _counts, (JUDGED, ROW),
        inputs=lambda clean: [text_column(i) for i in range(min(len(clean.columns.text), 2))],  # not the negatives
    )  # fmt: skip
    return prepare(settled, *rest, kind=kind, **more)


def _counts(tables: Any, labels: Any) -> dict[str, int]:
    if not labels.names or "train" not in tables:
        return {}
    ids = tables["train"][JUDGED][:]
    return {name: ids.count(i) for i, name in enumerate(labels.names)}


def encode(
    arguments: EmbeddingDataArguments, tokenizer: Any, columns: Columns, max_length: int, rows: Rows
) -> dict[str, list[Any]]:
    """Encodes rows of texts; each text is cut to `max_length`, including special tokens."""
    names = [name for i in range(len(rows)) if (name := text_column(i)) in rows]
    prompts = [arguments.query_prompt or "", *[arguments.document_prompt or ""] * (len(names) - 1)]
    made = [
        cut_to(tokenizer, max_length, text=[prompt + text for text in rows[name]])
        for name, prompt in zip(names, prompts, strict=True)
    ]
    sides = [side["input_ids"] for side, _ in made]
    return {
        IDS: [list(row) for row in zip(*sides, strict=True)],
        KEYS: [[key(text) for text in row] for row in zip(*(rows[name] for name in names), strict=True)],
        "length": [max(map(len, row)) for row in zip(*sides, strict=True)],
        "truncated": [any(row) for row in zip(*(was_cut for _, was_cut in made), strict=True)],
    }


def key(text: str) -> int:
    """A hash of a text; different texts collide with probability 2^-63."""
    return int.from_bytes(hashlib.blake2b(text.strip().encode(), digest_size=8).digest(), "little") >> 1


def collate(pad: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """B rows of C texts to `input_ids` and `attention_mask` (C B, T), text by text; the i-th texts have at most
    `widths[i]` tokens. Also `keys` (B, C) and `judged` (B,), zeros for pairs, as raw bits: under DeepSpeed the Trainer
    casts floats to bf16 (transformers 5.23, Trainer._prepare_input). `labels` (B,) come first, as the Trainer counts
    rows by them; `shift_labels` keep it from dropping the first row, which it would as the first token of a text."""
    sides = list(zip(*(row[IDS] for row in rows), strict=True))
    texts, one_each = [ids for side in sides for ids in side], torch.ones(len(rows), dtype=torch.long)
    return {
        "labels": one_each,
        "shift_labels": one_each,
        "input_ids": padded(texts, pad),
        "attention_mask": mask_of(texts),
        KEYS: torch.tensor([row[KEYS] for row in rows]),
        JUDGED: torch.tensor([float(row.get(JUDGED, 0)) for row in rows]).view(torch.int32),
        WIDTHS: [max(map(len, side)) for side in sides],
    }
