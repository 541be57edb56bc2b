"""Batches of like length, in an order that depends on the seed alone and never on the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

LISTED = 10_000  # indices that are Python's integers at one time
MEGABATCH = 50  # global batches that are sorted together: enough for little padding, little enough to stay random


class GlobalBatchSampler(Sampler[int]):
    """Yields indices so that each run of `global_batch_size` of them is one optimizer step.

    The Trainer's own length grouping sorts within `per_device_train_batch_size x gradient_accumulation_steps`
    (transformers 5.23, Trainer._get_train_sampler), so which samples meet in a step depends on the number of
    processes. Here it depends on the global batch alone: 1 x 32, 2 x 16 and 2 x 8 x 2 take the same steps.

    With `lengths` (one a sample, in tokens) a shuffled run of MEGABATCH global batches is sorted, cut into global
    batches, and these are shuffled again. Without, it is a plain shuffle. The last batch of an epoch is filled up from
    the epoch's first samples, so every step is a full one and is averaged right under gradient accumulation.
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
        for some in np.array_split(order, -(-len(order) // LISTED)):  # a list of all would take 40 bytes an index
            yield from some.tolist()

    def _group(self, order: npt.NDArray[np.int64], random: np.random.Generator) -> npt.NDArray[np.int64]:
        assert self.lengths is not None
        batches_in_all = len(order) // self.global_batch_size
        groups = np.array_split(order.reshape(-1, self.global_batch_size), -(-batches_in_all // MEGABATCH))
        flat = [group.ravel() for group in groups]
        grouped = np.concatenate([group[np.argsort(-self.lengths[group], kind="stable")] for group in flat])
        batches: npt.NDArray[np.int64] = grouped.reshape(-1, self.global_batch_size)
        shuffled = random.permutation(len(batches))
        # The longest batch goes first: if memory runs out, it does so at once.
        longest = int(np.argmax(self.lengths[batches].max(axis=1)[shuffled]))
        shuffled[[0, longest]] = shuffled[[longest, 0]]
        return batches[shuffled].ravel()
