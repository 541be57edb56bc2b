"""Which prompts are answered together, and by which rank. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

WINDOW = 64  # batches; prompts are grouped by length within a window


@dataclass(frozen=True)
class Batch:
    """Prompts by number, and how many tokens each answer may have."""

    numbers: list[int]
    limit: int


def batches_of(lengths: Sequence[int], positions: int, most_new: int, size: int) -> list[Batch]:
    """Batches of all prompts, independent of what is already answered and of the number of ranks: so rounding is the
    same.

    Prompts of similar length go together, the longest first, since they need the most memory. `lengths` are in tokens,
    each less than `positions`. A prompt that leaves no room for `most_new` gets the room there is, and only shares a
    batch with prompts of the same limit: finished rows are padded, at further positions, until the whole batch is done.
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
    """At most one batch per rank, all of one limit: ranks that share weights continue until the last is done."""
    for _, group in groupby(batches, key=lambda batch: batch.limit):
        some = list(group)
        yield from (some[i : i + ranks] for i in range(0, len(some), ranks))
