"""Sets of time as sorted lists of disjoint intervals, in whole nanoseconds, so that sums are exact."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]  # start and end in nanoseconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Any intervals, made disjoint: what lies in two is counted once."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(of: list[Interval], what: list[Interval]) -> list[Interval]:
    """The time in `of` and not in `what`; both disjoint and sorted."""
    left: list[Interval] = []
    first = 0
    for start, end in of:
        while first < len(what) and what[first][1] <= start:
            first += 1
        at = first
        while at < len(what) and what[at][0] < end:
            if what[at][0] > start:
                left.append((start, what[at][0]))
            start = max(start, what[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def intersect(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The time in both."""
    return subtract(one, subtract(one, other))


def length(intervals: list[Interval]) -> int:
    """In nanoseconds."""
    return sum(end - start for start, end in intervals)
