"""Plays a tape once as torch's autograd engine runs it, forward and backward: what is allocated and freed, in which
order, and where a training engine steps in. `finetune.plan.step` plays the result on a ledger.

The rules are those of torch/csrc/autograd/engine.cpp: nodes run in the reverse order of the forward pass, what a node
saved is freed once it has run, gradients that meet are added in place if nobody else holds the first one's storage
(input_buffer.cpp), and a parameter's gradient is handed on at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from finetune.plan.tape import Tape
from finetune.plan.values import CHUNKED_LOSS, Op, Segment, Storage, Value

ACTIVATIONS, GRADIENTS_FLOW, TEMPORARY = "activations", "activation_gradients", "temporary"


class Kind(Enum):
    """Where an engine steps in: before and after a module, and when weights' gradients are made and handed on."""

    BEFORE = 1
    AFTER = 2
    MADE = 3
    HANDED_ON = 4


class Stretch(NamedTuple):
    """What happens between two such places: the peak bytes by kind, and the net change."""

    peak: int
    at_peak: tuple[tuple[str, int], ...]
    where: str
    net: tuple[tuple[str, int], ...]


Event = Stretch | tuple[Kind, int]  # with the operator's index in its segment


@dataclass
class Program:
    """Events of each segment; a segment that is `like` another shares its events. `uses`: operators per weight."""

    forward: list[list[Event]]
    backward: list[list[Event]]
    uses: Counter[str]


@dataclass(eq=False)
class _Gradient:
    """`is_view`: of a matrix, as that of a linear layer's input is, so that the matrix holds its storage as well."""

    bytes: int
    holders: int = 1
    is_view: bool = False


@dataclass
class _Log:
    """`enters`: an engine steps in before and after modules. Without that there are fewer events, which play faster."""

    enters: bool
    events: list[Event] = field(default_factory=list)
    net: dict[str, int] = field(default_factory=dict)
    total: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    where: str = ""

    def take(self, kind: str, size: int, where: str) -> None:
        self.net[kind] = self.net.get(kind, 0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak, self.where = self.total, dict(self.net), where

    def give(self, kind: str, size: int) -> None:
        self.net[kind] = self.net.get(kind, 0) - size
        self.total -= size

    def passing(self, size: int, where: str) -> None:
        if size:
            self.take(TEMPORARY, size, where)
            self.give(TEMPORARY, size)

    def step_in(self, kind: Kind, place: int) -> None:
        if self.enters or kind in (Kind.MADE, Kind.HANDED_ON):
            self.cut()
            self.events.append((kind, place))

    def cut(self) -> None:
        if self.net:
            self.events.append(Stretch(self.peak, tuple(self.at_peak.items()), self.where, tuple(self.net.items())))
            self.net, self.total, self.peak, self.at_peak, self.where = {}, 0, 0, {}, ""

    def finish(self) -> list[Event]:
        self.cut()
        events, self.events = self.events, []
        return events


@lru_cache(maxsize=128)
def program_of(tape: Tape, enters: bool = True) -> Program:
    """The program of a complete tape, for an engine that `enters` modules or one that does not; cached."""
    return _Player(tape, enters).play()


@lru_cache(maxsize=128)
def evaluation_of(tape: Tape, enters: bool) -> list[list[Event]]:
    """Events of each segment of a forward pass without gradients, which saves nothing; cached."""
    return _Player(tape, enters).forward(keeps=False)


def modules_used(tape: Tape, goes_back: bool) -> list[Op]:
    """The operators at which an engine enters a module, in the forward pass and, if it `goes_back`, the backward."""
    program = program_of(tape)
    passes = [*zip(tape.segments, program.forward, strict=True)]
    if goes_back:
        passes += zip(reversed(tape.segments), reversed(program.backward), strict=True)
    return [segment.ops[event[1]] for segment, events in passes for event in events if event[0] is Kind.BEFORE]


class _Player:
    def __init__(self, tape: Tape, enters: bool) -> None:
        self.tape, self.segments = tape, tape.segments
        self.log = _Log(enters)
        self.alive: set[Storage] = set()
        self.saved: dict[Storage, int] = {}
        self.gradients: dict[Value, _Gradient] = {}
        self.repeats = Counter(segment.like for segment in self.segments)
        self.made = {at: segment for at, segment in enumerate(self.segments) if segment.like is None}

    def play(self) -> Program:
        forward = self.forward(keeps=True)
        backward = {}
        result = self.tape.result
        assert result is not None
        self.log.take(GRADIENTS_FLOW, result.bytes, "loss")  # its gradient, or that of a stage's output
        self.gradients[result] = _Gradient(result.bytes)
        for at, segment in reversed(self.made.items()):
            self._back_through(segment)
            if at == min(self.made):
                for gradient in self.gradients.values():
                    self._let_go(gradient)
            backward[at] = self.log.finish()
        assert not self.saved, "a tensor is kept for a backward pass that never came"
        uses = Counter(name for op in self.tape.ops for name in op.weights)
        return Program(forward, self._for_all(backward), uses)

    def _for_all(self, events: dict[int, list[Event]]) -> list[list[Event]]:
        """Copies events to the segments that repeat the played ones."""
        return [events[at if segment.like is None else segment.like] for at, segment in enumerate(self.segments)]

    # Forward

    def forward(self, keeps: bool) -> list[list[Event]]:
        """`keeps`: whether to save what a backward pass reads."""
        found = {}
        for at, segment in self.made.items():
            if segment.recomputed and keeps:
                on_device = segment.entry[1:] if self.tape.offloads else segment.entry  # the first: hidden states
                for value in on_device:
                    self._save(value.storage)
            for place, op in enumerate(segment.ops):
                self._run(op, place, segment.start + place, keeps and not segment.recomputed)
            if segment is self.segments[-1]:
                for storage in self.alive - self.saved.keys():
                    self._forget(storage)
            found[at] = self.log.finish()
        return self._for_all(found)

    def _run(self, op: Op, place: int, number: int, keeps: bool) -> None:
        if op.module:
            self.log.step_in(Kind.BEFORE, place)
        for value in op.outputs:
            storage = value.storage
            if storage not in self.alive and all(storage is not given.storage for given in op.inputs):
                self.alive.add(storage)
                self.log.take(ACTIVATIONS, storage.bytes, op.name)
        self.log.passing(op.scratch, op.name)
        if keeps:
            for storage in op.saved:
                self._save(storage)
        if op.module:
            self.log.step_in(Kind.AFTER, place)
        for value in (*op.inputs, *op.outputs):
            storage = value.storage
            if storage.last_use <= number and storage in self.alive and storage not in self.saved:
                self._forget(storage)

    def _forget(self, storage: Storage) -> None:
        """The forward pass no longer needs it. If it outlasts its segment, each repetition of that segment has made one
        too, and these are freed here as well, because no event of theirs does it."""
        self._free(storage, 1 + self.repeats[self.tape.outlasting.get(storage, -1)])

    def _save(self, storage: Storage) -> None:
        if storage not in self.saved:
            self.log.take(ACTIVATIONS, storage.bytes * (storage.copies - 1), "loop")
        self.saved[storage] = self.saved.get(storage, 0) + 1
        if storage not in self.alive:  # an input
            self.alive.add(storage)
            self.log.take(ACTIVATIONS, storage.bytes, "given")

    def _release(self, *storages: Storage) -> None:
        for storage in storages:
            self.saved[storage] -= 1
            if not self.saved[storage]:
                del self.saved[storage]
                self._free(storage, storage.copies)

    def _free(self, storage: Storage, times: int = 1) -> None:
        self.alive.discard(storage)
        self.log.give(ACTIVATIONS, storage.bytes * times)

    # Backward

    def _back_through(self, segment: Segment) -> None:
        again = segment.recomputed
        if again and self.tape.offloads:
            self._save(segment.entry[0].storage)  # comes back from the host
        for place in reversed(range(len(segment.ops))):
            op = segment.ops[place]
            if again and (op.saved or op.weights):  # the first that needs what was not saved
                self._again(segment, place)
                again = False
            self._back(op, place)
        if segment.recomputed:
            self._release(*(value.storage for value in segment.entry))

    def _again(self, segment: Segment, stop: int) -> None:
        """Recomputes a segment's forward pass, now saving, until everything needed is there
        (torch/utils/checkpoint.py, early_stop)."""
        for place, op in enumerate(segment.ops[:stop]):
            self._run(op, place, segment.start + place, keeps=True)
        last = segment.ops[stop]
        if any(value.storage in last.saved for value in last.outputs):
            self._run(last, stop, segment.start + stop, keeps=True)
        else:  # it saves only inputs, before it runs
            for storage in last.saved:
                self._save(storage)
        for storage in {value.storage for op in segment.ops for value in op.outputs} & self.alive:
            if storage not in self.saved:
                self._free(storage)

    def _back(self, op: Op, place: int) -> None:
        arrived = [self.gradients.pop(value) for value in op.outputs if value in self.gradients]
        if not arrived:
            self._release(*op.saved)
            return
        if op.module:
            self.log.step_in(Kind.BEFORE, place)
        before, after = (op.saved, ()) if op.name == CHUNKED_LOSS else ((), op.saved)  # it becomes the gradients
        self._release(*before)
        made: list[tuple[Value, _Gradient]] = []
        for value in op.inputs:
            if not value.needs_grad:
                continue
            if op.narrows or (op.passes_on and value.bytes == arrived[0].bytes):
                arrived[0].holders += 1
                made.append((value, arrived[0]))
            else:
                made.append((value, _Gradient(value.bytes, is_view=op.name == "linear")))
                self.log.take(GRADIENTS_FLOW, value.bytes, op.name)
        trains = any(map(self.tape.trains, op.weights))
        if trains:
            self.log.step_in(Kind.MADE, place)
        self.log.passing(op.scratch_back, op.name)
        for gradient in arrived:
            self._let_go(gradient)
        self._release(*after)
        if trains:
            self.log.step_in(Kind.HANDED_ON, place)
        if op.module:
            self.log.step_in(Kind.AFTER, place)
        for value, gradient in made:
            self._meet(value, gradient, op.name)

    def _meet(self, value: Value, gradient: _Gradient, where: str) -> None:
        first = self.gradients.get(value)
        if first is None:
            self.gradients[value] = gradient
        elif first.holders == 1 and not first.is_view:
            self._let_go(gradient)
        else:
            total = _Gradient(max(first.bytes, gradient.bytes))
            self.log.take(GRADIENTS_FLOW, total.bytes, where)
            self._let_go(first)
            self._let_go(gradient)
            self.gradients[value] = total

    def _let_go(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if not gradient.holders:
            self.log.give(GRADIENTS_FLOW, gradient.bytes)
