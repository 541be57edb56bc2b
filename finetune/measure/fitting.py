"""Fits what `finetune.measure.tracing` records of a few batches to a polynomial of the batch's sizes."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import product

from finetune.plan.families.parts import IMAGES, SEQ2SEQ
from finetune.plan.forward.parts import Batch, terms

ROWS = (2, 3)  # with only one row, some operators copy nothing
TOKENS = (32, 64, 96)
TARGETS = (48, 80, 112)  # tokens of a decoder behind an encoder


@cache
def points(head: str) -> tuple[Batch, ...]:
    """As many batches as a size has terms, such that these are independent."""
    texts: list[tuple[int, int | None]] = [(tokens, None) for tokens in (TOKENS[:1] if head == IMAGES else TOKENS)]
    if head == SEQ2SEQ:
        (one, two, three), (first, second, third) = TOKENS, TARGETS
        texts = [(one, first), (two, first), (three, first), (one, second), (one, third), (two, second)]
    return tuple(Batch(rows, tokens, targets=targets) for rows, (tokens, targets) in product(ROWS, texts))


@cache
def _inverse(head: str) -> list[list[Fraction]]:
    """The terms' at each point, by Gauss-Jordan elimination."""
    batches = points(head)
    rows = [[*map(Fraction, terms(head, at)), *(Fraction(at is one) for one in batches)] for at in batches]
    for i in range(len(rows)):
        at = next(j for j in range(i, len(rows)) if rows[j][i])
        rows[at], rows[i] = rows[i], [one / rows[at][i] for one in rows[at]]
        for j, row in enumerate(rows):
            if j != i:
                rows[j] = [x - row[i] * y for x, y in zip(row, rows[i], strict=True)]
    return [row[len(rows) :] for row in rows]


def fitted(found: list[int], head: str) -> list[float]:
    """The coefficients of `terms`, from the values at `points`."""
    return [float(sum(x * y for x, y in zip(row, found, strict=True) if x)) for row in _inverse(head)]
