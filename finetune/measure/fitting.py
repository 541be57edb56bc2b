"""Fits what `finetune.measure.tracing` records of a few batches to a polynomial of the batch's sizes."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import product

from finetune.plan.families.parts import IMAGES, SEQ2SEQ
from finetune.plan.forward.parts import Batch, terms

ROWS = (2, 3)  # with only one row, some operators copy nothing
UNIT = 16  # tokens; state-space layers compute whole chunks, of as many as their config says
TOKENS, FAR, NEAR = (2, 3, 4), 32, 8  # units; what is fitted is tried far from there, with loops less far
TARGETS = (40, 80, 112)  # tokens of a decoder behind an encoder


@cache
def points(head: str, unit: int = UNIT) -> tuple[Batch, ...]:
    """As many batches as a size has terms, such that these are independent."""
    lengths = [unit * many for many in TOKENS]
    texts: list[tuple[int, int | None]] = [(tokens, None) for tokens in (lengths[:1] if head == IMAGES else lengths)]
    if head == SEQ2SEQ:
        (one, two, three), (first, second, third) = lengths, TARGETS
        texts = [(one, first), (two, first), (three, first), (one, second), (one, third), (two, second)]
    return tuple(Batch(rows, tokens, targets=targets) for rows, (tokens, targets) in product(ROWS, texts))


@cache
def _inverse(head: str, unit: int) -> list[list[Fraction]]:
    """The terms' at each point, by Gauss-Jordan elimination."""
    batches = points(head, unit)
    rows = [[*map(Fraction, terms(head, at)), *(Fraction(at is one) for one in batches)] for at in batches]
    for i in range(len(rows)):
        at = next(j for j in range(i, len(rows)) if rows[j][i])
        rows[at], rows[i] = rows[i], [one / rows[at][i] for one in rows[at]]
        for j, row in enumerate(rows):
            if j != i:
                rows[j] = [x - row[i] * y for x, y in zip(row, rows[i], strict=True)]
    return [row[len(rows) :] for row in rows]


def far_point(head: str, unit: int, positions: int, units: int = FAR) -> Batch | None:
    """A batch of longer texts than any of `points`, of at most so many tokens; None if there is none."""
    tokens = min(units * unit, (positions - 1) // unit * unit)  # a slice of all positions is none
    return None if head in (IMAGES, SEQ2SEQ) or tokens <= TOKENS[-1] * unit else Batch(ROWS[0], tokens)


def fitted(found: list[int], head: str, unit: int = UNIT) -> list[float]:
    """The coefficients of `terms`, from the values at `points`."""
    return [float(sum(x * y for x, y in zip(row, found, strict=True) if x)) for row in _inverse(head, unit)]
