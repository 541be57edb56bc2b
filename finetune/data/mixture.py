"""Joins the blocks of several files to one data set, and reports their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset

from finetune.data.numbered import Numbered
from finetune.data.packing import PackedDataset


class Joined(ConcatDataset[Any]):
    """The blocks of `parts`. With `weights`, which are normalized, the sampler draws in these proportions
    (sampling.py)."""

    def __init__(
        self, parts: Sequence[PackedDataset], weights: Sequence[Fraction] | None = None, names: Sequence[str] = ()
    ) -> None:
        super().__init__(parts)
        self.parts, self.names = tuple(parts), names
        self.weights = [weight / sum(weights) for weight in weights] if weights else None
        self.sizes = [len(part) for part in parts]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """A batch; the rows of each part are read together."""
        found, bounds = dict[int, dict[str, torch.Tensor]](), [0, *self.cumulative_sizes]
        of_part: npt.NDArray[np.int64] = np.searchsorted(bounds, indices, side="right") - 1
        for part in np.unique(of_part).tolist():
            own = [index for index, other in zip(indices, of_part, strict=True) if other == part]
            rows = self.parts[part].__getitems__([index - bounds[part] for index in own])
            found |= zip(own, rows, strict=True)
        return [found[index] for index in indices]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.concatenate([part.lengths for part in self.parts])


def joined(
    parts: Sequence[PackedDataset], weights: Sequence[Fraction] | None = None, names: Sequence[str] = ()
) -> PackedDataset | Joined:
    return parts[0] if len(parts) == 1 else Joined(parts, weights, names)


def taken_of_each(split: Any, sampler: Any, samples: int) -> dict[str, dict[str, Any]]:
    """How many blocks, documents and tokens of each file were in the first `samples` of a run; empty for a single file.
    A document counts where it begins, as one that is cut is in several blocks."""
    split = split.rows if isinstance(split, Numbered) else split
    if not isinstance(split, Joined):
        return {}
    times: npt.NDArray[np.int64] = np.zeros(len(split), dtype=np.int64)  # how often each block was sampled
    epoch = 0
    while samples > 0:
        sampler.set_epoch(epoch)
        order = np.fromiter(sampler, dtype=np.int64)[:samples]
        times += np.bincount(order, minlength=len(split))
        samples, epoch = samples - len(order), epoch + 1
    found = dict[str, dict[str, Any]]()
    for name, part, own in zip(split.names, split.parts, np.split(times, split.cumulative_sizes[:-1]), strict=True):
        pieces, known = part.blocks, part.tokens.starts[:-1]
        begin = np.searchsorted(known, pieces.starts + pieces.sizes) - np.searchsorted(known, pieces.starts)
        documents = np.add.reduceat(begin, pieces.offsets[:-1])
        tokens = int((own * part.lengths).sum())
        found[name] = {"blocks": int(own.sum()), "documents": int((own * documents).sum()), "tokens": tokens}
    return found


def sentence_of_sources(taken: Mapping[str, Mapping[str, Any]]) -> str:
    """For the model card; empty for a single file."""
    every = sum(one["tokens"] for one in taken.values())
    shown = [
        f"{name} {one['blocks']:,} blocks, {one['documents']:,} documents and {one['tokens']:,} tokens "
        f"({one['tokens'] / max(every, 1):.1%}{_of_loss(one)})"
        for name, one in taken.items()
    ]
    return f"trained on (counting repetitions): {'; '.join(shown)}" if shown else ""


def _of_loss(one: Mapping[str, Any]) -> str:
    return f", mean loss {one['loss']:.4g}" if "loss" in one else ""


def note_of_shares(names: Sequence[str], split: Joined, learnt: Mapping[str, int]) -> str:
    """What an epoch takes of each file; `learnt` counts the trained tokens of each file."""
    weights = split.weights or [Fraction(size) for size in split.sizes]
    samples = [float(weight / sum(weights)) * len(split) for weight in weights]
    tokens = [learnt[name] / size * taken for name, size, taken in zip(names, split.sizes, samples, strict=True)]
    shown = [
        f"{name} {taken / len(split):.1%}, {_taken(taken, size)}, {count / sum(tokens):.1%} of the trained tokens"
        for name, size, taken, count in zip(names, split.sizes, samples, tokens, strict=True)
    ]
    return f"mixed by blocks, an epoch of {len(split):,}: {'; '.join(shown)}"


def _taken(samples: float, size: int) -> str:
    if round(samples) == size:
        return f"each of {size:,} once"
    if samples < size:
        return f"{samples:,.0f} of {size:,}, the others in later epochs"
    return f"each of {size:,} repeated {samples / size:.2f} times"
