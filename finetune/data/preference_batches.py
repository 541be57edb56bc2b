"""Collates preference rows into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from finetune.data.columns import IGNORED

OF_PAIRS, OF_ANSWERS = ("chosen", "rejected"), ("answer", "other")


def collate(sides: tuple[str, str], pad: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """B rows to `input_ids`, `attention_mask` and `targets` (2 B, T): the token after each position, or IGNORED where
    it is not trained on. `places` (2 B,) number all texts, two per row. `labels` (B,) come first, as the Trainer counts
    rows by them; `shift_labels` keep it from dropping the first row, which it would as the first token of a text."""
    ids = [row[f"{side}_ids"] for side in sides for row in rows]
    learnt = [row[f"{side}_learnt"] for side in sides for row in rows]
    shape = len(ids), max(map(len, ids))
    batch = {
        **of_rows(rows),
        "input_ids": torch.full(shape, pad),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "targets": torch.full(shape, IGNORED),
    }
    for i, (tokens, used) in enumerate(zip(ids, learnt, strict=True)):
        own, counts = torch.tensor(tokens), torch.tensor(used)
        batch["input_ids"][i, : len(own)] = own
        batch["attention_mask"][i, : len(own)] = 1
        batch["targets"][i, : len(own) - 1] = torch.where(counts, own, IGNORED)[1:]
    return batch


def of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The part of a batch that depends on the rows and not on their sides."""
    one_each = torch.ones(len(rows), dtype=torch.long)
    return {
        "labels": one_each,
        "shift_labels": one_each,
        "desirable": torch.tensor([bool(row["label"]) for row in rows]),
        "places": torch.tensor([2 * row["row"] + side for side in (0, 1) for row in rows]),
    }
