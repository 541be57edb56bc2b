"""Loops in recordings: without a kernel of its own, a layer runs the same operators for each token, or for each chunk
of tokens, of a text. Recordings of texts of different lengths show where."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from finetune.measure.recording import Recording

BEFORE, BEHIND = 2, 2  # iterations that stay before and behind the one that stands for all others: first ones may have
# no state yet, and the last but one is the first, backward, whose gradients meet others
KEPT = BEFORE + 1 + BEHIND
LONGEST = 500  # operators of an iteration
AFTER = 8  # operators that must agree behind a loop

Loop = tuple[int, int, int]  # its first operator, operators of an iteration, iterations


def fold(runs: Sequence[Recording]) -> bool:
    """Cuts each loop down to `KEPT` iterations. Operators of the third say how many `times` it runs in place of those
    that are cut, and which of its outputs are `held` beyond the loop. False if recordings differ by more than loops."""
    seen = [[mark(op) for op in run.ops] for run in runs]
    lengths = [*map(len, seen)]
    for run, own in zip(runs, seen, strict=True):
        other = next((one for one, many in zip(seen, lengths, strict=True) if many != len(own)), own)
        loops = _loops(own, other)
        if loops is None:
            return False
        _fold(run, loops)
    return len({(len(run.facts), *(op["name"] for op in run.ops)) for run in runs}) == 1


def mark(op: dict[str, Any]) -> Hashable:
    return op["name"], op["segment"], op["part"], len(op["out"]), *op["weights"]


def _loops(one: Sequence[Hashable], two: Sequence[Hashable]) -> list[Loop] | None:
    """Those of the first sequence that have another number of iterations in the second."""
    found, i, j = list[Loop](), 0, 0
    while True:
        since = i
        while i < len(one) and j < len(two) and one[i] == two[j]:
            i, j = i + 1, j + 1
        if i == len(one) and j == len(two):
            return found
        for period in range(1, min(LONGEST, i - since) + 1):
            start = i - period
            while start > since and one[start - 1] == one[start - 1 + period]:
                start -= 1
            ends = _end(one, i, period), _end(two, j, period)
            more = (ends[0] - i) - (ends[1] - j)
            many = (ends[0] - start) // period
            fewest = min(many, many - more // period)
            agree = one[ends[0] : ends[0] + AFTER] == two[ends[1] : ends[1] + AFTER]
            if more and more % period == 0 and fewest > KEPT and agree:
                found.append((start, period, many))
                i, j = ends
                break
        else:
            return None


def _end(names: Sequence[Hashable], at: int, period: int) -> int:
    while at < len(names) and names[at] == names[at - period]:
        at += 1
    return at


def _fold(run: Recording, loops: Sequence[Loop]) -> None:
    like, gone = dict[int, int](), dict[int, int]()  # values and operators that are cut, and which stand for them
    maker = {fact[2]: number for number, fact in reversed([*enumerate(run.facts)])}
    for start, period, many in loops:
        first, rest, end = (start + iteration * period for iteration in (BEFORE, many - BEHIND, many))
        for op in run.ops[first : first + period]:
            own = [number for number in op["out"] if maker[run.facts[number][2]] == number]
            op["held"] = [number for number in own if run.last[run.facts[number][2]] >= end]
            op["times"] = many - KEPT + 1
        for at in range(first + period, rest):
            stands = (at - first) % period
            gone[at] = rest + stands  # what dies in the iteration that follows dies in the first that stays
            pairs = zip(run.ops[at]["out"], run.ops[first + stands]["out"], strict=True)
            like |= {old: new for old, new in pairs if old != new}
    if loops:
        _renumber(run, like, gone)


def _renumber(run: Recording, like: dict[int, int], gone: dict[int, int]) -> None:
    """Cuts values and operators, and what is alive only in them."""
    values = _numbers(len(run.facts), like)
    pairs = [(run.facts[old][2], run.facts[new][2]) for old, new in like.items()]
    places = _numbers(len(run.last), {old: new for old, new in pairs if old != new})
    ops = _numbers(len(run.ops) + 1, gone)
    stay = {places[place]: place for place in reversed(range(len(run.last)))}
    for op in run.ops:
        op["in"] = [values[one] for one in op["in"] if one not in like or like[one] not in op["in"]]
        op["saved"] = [*dict.fromkeys(places[one] for one in op["saved"])]
        op |= {name: [values[one] for one in op[name]] for name in ("out", "held") if name in op}
    run.facts = [[*size, places[place], grad] for at, (*size, place, grad) in enumerate(run.facts) if at not in like]
    run.last = [ops[run.last[stay[place]]] for place in range(len(stay))]
    run.ops = [op for at, op in enumerate(run.ops) if at not in gone]
    run.kept, run.result = [values[one] for one in run.kept], values[run.result]


def _numbers(count: int, like: dict[int, int]) -> list[int]:
    """New numbers: of what stays in order, of what is cut that of what stands for it."""
    found, rest = list[int](), 0
    for old in range(count):
        found.append(rest)
        rest += old not in like
    for old, new in like.items():
        found[old] = found[new]
    return found
