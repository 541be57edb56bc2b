"""Preference pairs whose shared prompt is computed once: a row is the prompt, the chosen answer, and the rejected
answer. The rejected answer's positions continue from the prompt's, and a mask (finetune.models.shared_prompt) hides the
chosen answer from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from finetune.data.columns import IGNORED
from finetune.data.preference_batches import OF_PAIRS, of_rows

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
