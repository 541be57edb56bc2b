"""Which prompts are answered together, and by whom. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

WINDOW = 64  # batches among which prompts of like length are put together


@dataclass(frozen=True)
class Batch:
    """Prompts by their numbers, and how many tokens each may be answered by."""

    numbers: list[int]
    limit: int


def batches_of(lengths: Sequence[int], positions: int, most_new: int, size: int) -> list[Batch]:
    """Of all prompts, whatever is answered already and however many ranks there are: so the rounding is the same.

    Those of like length are together, the longest first, which need the most memory. `lengths` are in tokens, fewer
    than `positions` each. Where a prompt leaves no room for `most_new`, it gets what there is, and is put together
    with those alone that get as much: a row that has ended is padded until all of its batch have, at further positions.
    """
    found = []
    for start in range(0, len(lengths), WINDOW * size):
        window = range(start, min(start + WINDOW * size, len(lengths)))
        ordered = sorted(window, key=lambda number: (-lengths[number], number))
        for limit, group in groupby(ordered, key=lambda number: min(most_new, positions - lengths[number])):
            numbers = list(group)
            found += [Batch(numbers[i : i + size], limit) for i in range(0, len(numbers), size)]
    return found


def rounds_of(batches: Sequence[Batch], ranks: int) -> Iterator[list[Batch]]:
    """At most a batch for each rank; of one limit, for ranks that share their weights go on until the last has done."""
    for _, group in groupby(batches, key=lambda batch: batch.limit):
        some = list(group)
        yield from (some[i : i + ranks] for i in range(0, len(some), ranks))
