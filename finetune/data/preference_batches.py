"""Collates preference rows into batches.

With a shared prompt, which is computed once, a row is the prompt, the chosen answer, and the rejected answer. The
rejected answer's positions continue from the prompt's, and a mask (finetune.models.probes) hides the chosen answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
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


PROMPT, CHOSEN, REJECTED, PADDING = range(4)  # the segment of a row to which a token belongs


def shared_tokens(row: Mapping[str, Any]) -> int:
    """How many leading tokens both sides share and compute once. The last token before an answer is excluded: its
    target differs, so each side has its own."""
    ids, learnt = ([list(row[f"{side}_{name}"]) for side in OF_PAIRS] for name in ("ids", "learnt"))
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ids, strict=False)))
    first = [used.index(True) for used in learnt if True in used]  # truncation may leave a side without trained tokens
    return max(min(alike, *first) - 1, 0)


def collate_shared(pad: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """As `finetune.data.preference_batches.collate`, but `input_ids`, `attention_mask` and `targets` of B pairs are
    (B, T); `segments` (B, T) is each token's segment, and `position_ids` (B, T) its position in its side."""
    found = [_joined(row) for row in rows]
    fill = {"input_ids": pad, "targets": IGNORED, "segments": PADDING, "position_ids": 0}
    shape = len(rows), max(len(one["input_ids"]) for one in found)
    batch = {**of_rows(rows), **{name: torch.full(shape, value) for name, value in fill.items()}}
    for i, one in enumerate(found):
        for name, values in one.items():
            batch[name][i, : len(values)] = torch.tensor(values)
    batch["attention_mask"] = (batch["segments"] != PADDING).long()
    return batch


def _joined(row: Mapping[str, Any]) -> dict[str, list[int]]:
    shared = shared_tokens(row)
    ids = list(row["chosen_ids"][:shared])
    found = {"input_ids": ids, "targets": [IGNORED] * shared, "segments": [PROMPT] * shared}
    found["position_ids"] = list(range(shared))
    for side, segment in zip(OF_PAIRS, (CHOSEN, REJECTED), strict=True):
        own, learnt = row[f"{side}_ids"][shared:], row[f"{side}_learnt"][shared:]
        following = [token if used else IGNORED for token, used in zip(own[1:], learnt[1:], strict=True)]
        found["input_ids"] += own
        found["targets"] += [*following, IGNORED]
        found["segments"] += [segment] * len(own)
        found["position_ids"] += range(shared, shared + len(own))
    return found
