"""Batches of similar length, in an order that depends on the seed and not on the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

LISTED = 10_000  # indices held as Python integers at a time
MEGABATCH = 50  # global batches sorted together: enough to reduce padding, few enough to stay random


class GlobalBatchSampler(Sampler[int]):
    """Yields indices so that each run of `global_batch_size` of them is one optimizer step.

    The Trainer's own length grouping sorts within `per_device_train_batch_size x gradient_accumulation_steps`
    (transformers 5.23, Trainer._get_train_sampler), so which samples meet in a step depends on the number of
    processes. Here it depends on the global batch alone: 1 x 32, 2 x 16 and 2 x 8 x 2 take the same steps.

    With `lengths` (of each sample, in tokens), a shuffled run of MEGABATCH global batches is sorted, cut into global
    batches, and these are shuffled again. Without, it is a plain shuffle. An epoch's last batch is filled up with the
    epoch's first samples, so every step is full and gradient accumulation averages correctly.
    """

    def __init__(self, size: int, global_batch_size: int, seed: int, lengths: Sequence[int] | None = None) -> None:
        self.size = size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.size // self.global_batch_size) * self.global_batch_size

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        order: npt.NDArray[np.int64] = np.resize(random.permutation(self.size), len(self))
        if self.lengths is not None:
            order = self._group(order, random)
        for some in np.array_split(order, -(-len(order) // LISTED)):  # one list of all takes 40 bytes per index
            yield from some.tolist()

    def _group(self, order: npt.NDArray[np.int64], random: np.random.Generator) -> npt.NDArray[np.int64]:
        assert self.lengths is not None
        batches_in_all = len(order) // self.global_batch_size
        groups = np.array_split(order.reshape(-1, self.global_batch_size), -(-batches_in_all // MEGABATCH))
        flat = [group.ravel() for group in groups]
        grouped = np.concatenate([group[np.argsort(-self.lengths[group], kind="stable")] for group in flat])
        batches: npt.NDArray[np.int64] = grouped.reshape(-1, self.global_batch_size)
        shuffled = random.permutation(len(batches))
        # The longest batch goes first: if memory runs out, it happens at once.
        longest = int(np.argmax(self.lengths[batches].max(axis=1)[shuffled]))
        shuffled[[0, longest]] = shuffled[[longest, 0]]
        return batches[shuffled].ravel()


class MixtureSampler(GlobalBatchSampler):
    """Samples several sources, concatenated in one data set with these `sizes`, in proportion to `weights`. At any
    point of the run, in any epoch, each source is within one sample of its share. Each pass over a source has its own
    order, and the next epoch continues where the last one stopped. An epoch has as many samples as the data set."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[Fraction], global_batch_size: int, seed: int) -> None:
        super().__init__(sum(sizes), global_batch_size, seed)
        self.sizes, self.weights = sizes, weights
        self.taken = [[0] * len(sizes)]  # samples of each source before each epoch computed so far

    def __iter__(self) -> Iterator[int]:
        while len(self.taken) <= self.epoch:
            before = self.taken[-1]
            more = np.bincount(interleaved(self.weights, before, len(self)), minlength=len(before))
            self.taken.append((before + more).tolist())
        counts = self.taken[self.epoch]
        sources = interleaved(self.weights, counts, len(self))
        order: npt.NDArray[np.int64] = np.zeros(len(self), dtype=np.int64)
        for source, size in enumerate(self.sizes):
            places = np.flatnonzero(sources == source)
            order[places] = sum(self.sizes[:source]) + self._of(source, size, counts[source], len(places))
        for some in np.array_split(order, -(-len(order) // LISTED)):
            yield from some.tolist()

    def _of(self, source: int, size: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """The indices of one source's samples `first` to `first + count`, counted over the whole run."""
        rounds = range(first // size, -(-(first + count) // size))
        orders = [np.random.default_rng((self.seed, source, one)).permutation(size) for one in rounds]
        begin = first - first // size * size
        return np.concatenate([np.zeros(0, np.int64), *orders])[begin : begin + count]


def interleaved(weights: Sequence[Fraction], counts: Sequence[int], samples: int) -> npt.NDArray[np.uint8]:
    """The source of each of the next `samples`, after `counts` samples of each. Uses Tijdeman's algorithm (The chairman
    assignment problem, 1980), which keeps each of k sources within 1 - 1 / (2k - 2) of its share. Integer arithmetic
    makes all ranks agree."""
    scale = lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * scale) for weight in weights]
    total, most = sum(shares), 2 * len(shares) - 2
    owed = [share * sum(counts) - total * count for share, count in zip(shares, counts, strict=True)]
    found = bytearray(samples)
    sources = range(len(shares))
    for n in range(samples):
        chosen, soonest = 0, float("inf")
        for i in sources:
            owed[i] += shares[i]
            if owed[i] * most >= total:
                due = ((most - 1) * total - most * owed[i]) / shares[i]
                if due < soonest:
                    chosen, soonest = i, due
        owed[chosen] -= total
        found[n] = chosen
    return np.frombuffer(bytes(found), dtype=np.uint8)


def sampler_of(dataset: Any, global_batch_size: int, seed: int, lengths: Any) -> GlobalBatchSampler:
    """The training order of a data set: by its `weights` if it has any; otherwise shuffled, grouped by `lengths` if
    given."""
    if weights := getattr(dataset, "weights", None):
        return MixtureSampler(dataset.sizes, weights, global_batch_size, seed)
    return GlobalBatchSampler(len(dataset), global_batch_size, seed, lengths)
