"""Sequence parallelism: which rows a group of ranks reads together, and which part of each text a rank gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler

from finetune.data.numbered import NUMBER
from finetune.data.packing import IGNORED, REAL_TOKENS
from finetune.data.sampling import GlobalBatchSampler

WHOLE_POSITIONS = "whole_positions"  # positions of all tokens, if documents in a block are masked from one another
FILL = {"input_ids": 0, "labels": IGNORED, "shift_labels": IGNORED, "position_ids": 0}


class SharedRows(Sampler[int]):
    """The indices of `sampler`, each micro-batch repeated for the ranks that share it: accelerate deals micro-batches
    to the ranks in turn (1.15, data_loader.py, BatchSamplerShard), so adjacent ranks read the same rows."""

    def __init__(self, sampler: GlobalBatchSampler, micro_batch: int, sharing: int) -> None:
        self.sampler, self.micro_batch, self.sharing = sampler, micro_batch, sharing

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler) * self.sharing

    def __iter__(self) -> Iterator[int]:
        order = iter(self.sampler)
        while rows := list(islice(order, self.micro_batch)):
            for _ in range(self.sharing):
                yield from rows


class SharedTexts:
    """A collator of blocks: rank `rank` of `size` gets its slice (B, T / size) of what `collate` makes, in text order,
    with positions in the whole text, and the number of real tokens in it. T is first padded to a multiple of `size`."""

    def __init__(self, collate: Callable[[Any], dict[str, torch.Tensor]], size: int, rank: int) -> None:
        self.collate, self.size, self.rank = collate, size, rank

    def __call__(self, rows: Any) -> dict[str, torch.Tensor]:
        batch = dict(self.collate(rows))
        mask, real = batch.pop("attention_mask", None), batch.pop(REAL_TOKENS, None)
        numbers = {NUMBER: batch.pop(NUMBER)} if NUMBER in batch else {}  # of rows
        ids = batch["input_ids"]
        if real is None:
            real = torch.full((len(ids),), ids.shape[1]) if mask is None else mask.sum(dim=1)
        missing = -ids.shape[1] % self.size
        batch = {name: torch.nn.functional.pad(value, (0, missing), value=FILL[name]) for name, value in batch.items()}
        length = ids.shape[1] + missing
        documents = batch.get("position_ids")
        if documents is None:  # padding comes last, and causal attention never looks ahead
            batch["position_ids"] = torch.arange(length).expand(len(ids), length)
        share = length // self.size
        part = slice(self.rank * share, (self.rank + 1) * share)
        shared = {name: value[:, part].clone() for name, value in batch.items()}
        shared[REAL_TOKENS] = (real - part.start).clamp(0, share)  # padding comes last
        shared |= numbers
        return shared if documents is None else {**shared, WHOLE_POSITIONS: documents}
