"""Programs for engines that do nothing before and after modules: with fewer events, so they play faster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from finetune.plan.program import Event, Kind, Program, Stretch, evaluation_of, program_of
from finetune.plan.tape import Tape

Sizes = tuple[tuple[str, int], ...]  # bytes by kind


@lru_cache(maxsize=128)
def joined_program_of(tape: Tape) -> Program:
    """As `program_of`; cached."""
    found = program_of(tape)
    return Program(_for_all(found.forward), _for_all(found.backward), found.uses)


@lru_cache(maxsize=128)
def joined_evaluation_of(tape: Tape) -> list[list[Event]]:
    """As `evaluation_of`; cached."""
    return _for_all(evaluation_of(tape))


def _for_all(program: list[list[Event]]) -> list[list[Event]]:
    made = {id(events): [*_joined(events)] for events in program}  # like segments share theirs
    return [made[id(events)] for events in program]


def _joined(events: list[Event]) -> Iterator[Event]:
    before: Stretch | None = None
    for event in events:
        if isinstance(event, Stretch):
            before = event if before is None else _both(before, event)
        elif event[0] in (Kind.MADE, Kind.HANDED_ON):
            yield from () if before is None else (before,)
            yield event
            before = None
    yield from () if before is None else (before,)


def _both(one: Stretch, other: Stretch) -> Stretch:
    total, net = sum(size for _, size in one.net), _sum(one.net, other.net)
    if total + other.peak <= one.peak:
        return Stretch(one.peak, one.at_peak, one.where, net)
    return Stretch(total + other.peak, _sum(one.net, other.at_peak), other.where, net)


def _sum(one: Sizes, other: Sizes) -> Sizes:
    found = dict(one)
    for kind, size in other:
        found[kind] = found.get(kind, 0) + size
    return tuple(found.items())
