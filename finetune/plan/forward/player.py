"""A trace that is being played on a tape: what its operators read and make, as values on the tape."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Any

from finetune.plan.families.parts import IMAGES
from finetune.plan.forward.cuts import uses_of
from finetune.plan.forward.parts import Setting, filled, terms
from finetune.plan.model import MLP, Trace
from finetune.plan.values import HALF_BYTES, Storage, Value


class Player:
    """The values of a trace that a tape has so far, and how large those are that it makes next."""

    def __init__(self, trace: Trace, setting: Setting) -> None:
        self.trace, self.setting, self.tape = trace, setting, setting.tape
        self.numbers, self.batch = self.tape.numbers, setting.batch
        self.dropout = 0.5 if self.batch.drops else 0.0  # any probability
        self.values, self.storages = dict[int, Value](), dict[int, Storage]()
        self.whole: dict[int, int] = {}  # bytes per element before a conversion to fp32
        self.in_fp32: dict[int, str] = {}  # weights that a conversion to fp32 does not change
        self.seen = uses_of(trace)
        self.terms = dict[int, tuple[int, ...]]()  # of texts filled up to so many tokens
        self.masks: tuple[Value, ...] = ()  # of all attention without a mask of its own

    def total(self, fitted: Sequence[float], chunk: int) -> int:
        if chunk not in self.terms:
            self.terms[chunk] = terms(self.setting.head, filled(self.batch, chunk) if chunk > 1 else self.batch)
        found: float = sum(map(mul, fitted, self.terms[chunk]))
        return round(found)

    def size(self, fitted: Sequence[float], number: int) -> int:
        """Where the value `number` is made."""
        return max(self.total(fitted, *self.trace.values[number][4:] or (1,)), 1)

    def sizes(self, op: Any, product: int = 0) -> list[int]:
        return [self.size(side, op["out"][0]) for side in op["gemms"][product]]

    def times(self, op: Any) -> int:
        """How often it runs in place of iterations that were cut: less than never in a shorter loop."""
        return self.total(op["times"], op.get("filled") or 1) if "times" in op else 1

    def elements(self, number: int) -> int:
        return self.size(self.trace.values[number][0], number)

    def value(self, number: int) -> Value:
        if number not in self.values:  # a batch or a buffer: already allocated
            traced = self.trace.values[number][1]
            is_float = traced == HALF_BYTES and (self.setting.head == IMAGES or self.setting.family == MLP)
            size = self.numbers.bytes_each if is_float else traced
            self.put(number, Value(self.elements(number), size, Storage(0), False))
        return self.values[number]

    def put(self, number: int, value: Value) -> None:
        place = self.trace.values[number][2]
        if number in self.seen.held:
            value.storage.bytes, value.storage.copies = value.storage.bytes * value.storage.copies, 1
        self.values[number], self.storages[place] = value, value.storage
        is_last = self.trace.last[place] == len(self.trace.ops)
        if is_last and value.storage.bytes and not self.tape.segments[-1].recomputed:
            self.tape.keep_to_end(value)
