"""Collates preference rows into batches.

With a shared prompt, which is computed once, a row is the prompt, the chosen answer, and the rejected answer. The
rejected answer's positions continue from the prompt's, and a mask (finetune.models.probes) hides the chosen answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from finetune.data.columns import IGNORED
from finetune.data.packing import mask_of, padded

OF_PAIRS, OF_ANSWERS = ("chosen", "rejected"), ("answer", "other")


def collate(sides: tuple[str, str], pad: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """B rows to `input_ids`, `attention_mask` and `targets` (2 B, T): the token after each position, or IGNORED where
    it is not trained on. `places` (2 B,) number all texts, two per row. `labels` (B,) come first, as the Trainer counts
    rows by them; `shift_labels` keep it from dropping the first row, which it would as the first token of a text."""
    ids = [row[f"{side}_ids"] for side in sides for row in rows]
    learnt = [row[f"{side}_learnt"] for side in sides for row in rows]
    targets = [_following(*side) for side in zip(ids, learnt, strict=True)]
    return {
        **of_rows(rows),
        "input_ids": padded(ids, pad),
        "attention_mask": mask_of(ids),
        "targets": padded(targets, IGNORED),
    }


def _following(ids: Sequence[int], learnt: Sequence[bool]) -> list[int]:
    """For each token the next one, or IGNORED if that is not trained on."""
    return [*(token if used else IGNORED for token, used in zip(ids[1:], learnt[1:], strict=True)), IGNORED]


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
    batch = {name: padded((one[name] for one in found), value) for name, value in fill.items()}
    return {**of_rows(rows), **batch, "attention_mask": (batch["segments"] != PADDING).long()}


def _joined(row: Mapping[str, Any]) -> dict[str, list[int]]:
    shared = shared_tokens(row)
    ids = list(row["chosen_ids"][:shared])
    found = {"input_ids": ids, "targets": [IGNORED] * shared, "segments": [PROMPT] * shared}
    found["position_ids"] = list(range(shared))
    for side, segment in zip(OF_PAIRS, (CHOSEN, REJECTED), strict=True):
        own, learnt = row[f"{side}_ids"][shared:], row[f"{side}_learnt"][shared:]
        found["input_ids"] += own
        found["targets"] += _following(own, learnt)
        found["segments"] += [segment] * len(own)
        found["position_ids"] += range(shared, shared + len(own))
    return found
