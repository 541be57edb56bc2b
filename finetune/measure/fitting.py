"""Fits what `finetune.measure.tracing` records of a few batches to a polynomial of the batch's sizes, and tells which
sizes are those of texts that layers fill up to whole chunks, blocks or windows."""

from __future__ import annotations

from difflib import SequenceMatcher
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

from finetune.measure.loops import mark
from finetune.measure.recording import Recording
from finetune.plan.families.parts import IMAGES, SEQ2SEQ
from finetune.plan.forward.parts import Batch, filled, terms

ROWS = (2, 3)  # with only one row, some operators copy nothing
UNIT = 16  # tokens; state-space layers compute whole chunks, of as many as their config says
TOKENS = 2, 3, 4  # units
# What is fitted is tried with longer texts: with loops of so many units, otherwise of so many tokens; or units, if the
# model takes no longer ones.
NEAR, FAR, FAR_UNITS = 8, 4096, 32
TARGETS = (40, 80, 112)  # tokens of a decoder behind an encoder
CHUNKS = tuple(2**power for power in range(13))  # tokens up to whose multiples a layer may fill a text


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


def far_points(head: str, unit: int, positions: int, loops: bool) -> list[Batch]:
    """Batches of longer texts than any of `points`, of at most so many tokens, the longest first."""
    longest = (NEAR * unit,) if loops else (max(NEAR * unit, FAR), FAR_UNITS * unit)
    lengths = [min(tokens, positions - 1) // unit * unit for tokens in longest]  # a slice of all positions is none
    targets = TARGETS[0] + UNIT if head == SEQ2SEQ else None
    found = [Batch(ROWS[0], tokens, targets=targets) for tokens in lengths if tokens > TOKENS[-1] * unit]
    return [] if head == IMAGES else found


def odd_points(head: str, unit: int) -> list[Batch]:
    """Two batches of texts that are no whole chunks."""
    targets = TARGETS[0] if head == SEQ2SEQ else None
    return [Batch(ROWS[0], units * unit + 1, targets=targets) for units in TOKENS[:2]]


def at_batch(fitted: list[float], head: str, batch: Batch) -> int:
    """A size from its coefficients."""
    return round(sum(one * term for one, term in zip(fitted, terms(head, batch), strict=True)))


def fitted(found: list[int], head: str, unit: int = UNIT) -> list[float]:
    """The coefficients of `terms`, from the values at `points`."""
    return [float(sum(x * y for x, y in zip(row, found, strict=True) if x)) for row in _inverse(head, unit)]


def fill(trace: dict[str, Any], like: Recording, batch: Batch, odd: Recording, head: str) -> None:
    """Adds to each value and each loop of `trace`, which was fitted to whole chunks, to how many tokens it is filled
    up, if it is. `like`: a recording that the trace is of; `odd`: one of `batch`, whose texts are no whole chunks. It
    may have further operators, which cut off what was filled."""
    alike = SequenceMatcher(None, [mark(op) for op in like.ops], [mark(op) for op in odd.ops], autojunk=False)
    for block in alike.get_matching_blocks():
        for op, other in zip(trace["ops"][block.a :][: block.size], odd.ops[block.b :][: block.size], strict=True):
            for number, its in zip(op["out"], other["out"], strict=True):
                value = trace["values"][number]
                value[4:] = _chunk(value[0], odd.facts[its][0], head, batch)
            if "times" in op and "times" in other:
                op["filled"] = sum(_chunk(op["times"], other["times"], head, batch))


def _chunk(fitted: list[float], found: int, head: str, batch: Batch) -> list[int]:
    """Nothing if it is as long as the text, or as no other."""
    chunks = (chunk for chunk in CHUNKS if at_batch(fitted, head, filled(batch, chunk)) == found)
    return [chunk for chunk in (next(chunks, 1),) if chunk > 1]
