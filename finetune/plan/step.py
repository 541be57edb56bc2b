"""A training step on a ledger: what is alive at each moment, and when memory peaks.

ledger = Ledger()
passed = Pass(tape, ledger, engine)
passed.forward(), passed.backward()
ledger.peak.bytes, ledger.peak.by_kind
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from finetune.plan.program import TEMPORARY, Event, Kind, Stretch, evaluation_of, program_of
from finetune.plan.tape import Tape
from finetune.plan.values import TILED_MLP, Op, Segment


@dataclass(frozen=True)
class Moment:
    """What is alive at a moment: `phase` of the step ("forward", "backward", ...); `where`: the operator or event."""

    phase: str
    where: str
    bytes: int
    by_kind: dict[str, int]


@dataclass
class Ledger:
    """Bytes by kind, the peak of each phase, and a timeline of (phase, place, bytes)."""

    live: dict[str, int] = field(default_factory=dict)
    total: int = 0
    phase: str = "forward"
    place: str = ""  # the part of the model that is running
    peaks: dict[str, Moment] = field(default_factory=dict)
    timeline: list[tuple[str, str, int]] = field(default_factory=list)

    def take(self, kind: str, size: int, where: str = "") -> None:
        self.run(Stretch(size, ((kind, size),), where, ((kind, size),)))

    def give(self, kind: str, size: int) -> None:
        self.live[kind] -= size
        self.total -= size

    def passing(self, kind: str, size: int, where: str = "") -> None:
        """Takes and gives back at once."""
        if size:
            self.take(kind, size, where)
            self.give(kind, size)

    def run(self, stretch: Stretch) -> None:
        """Applies a whole stretch."""
        reached = self.total + stretch.peak
        best = self.peaks.get(self.phase)
        if best is None or reached > best.bytes:
            kinds = dict(self.live)
            for kind, size in stretch.at_peak:
                kinds[kind] = kinds.get(kind, 0) + size
            where = f"{stretch.where} of {self.place}" if stretch.where and self.place else stretch.where
            self.peaks[self.phase] = Moment(self.phase, where, reached, kinds)
        for kind, size in stretch.net:
            self.live[kind] = self.live.get(kind, 0) + size
            self.total += size

    def mark(self, where: str) -> None:
        self.timeline.append((self.phase, where, self.total))

    @property
    def peak(self) -> Moment:
        return max(self.peaks.values(), key=lambda moment: moment.bytes)


class Engine:
    """What an engine adds to autograd: by itself nothing. DDP, FSDP and the ZeRO stages are subclasses.

    `own_linear`: linear layers use the engine's own function, which yields a weight's gradient before its bias's.
    `enters_modules`: it does something before or after a module."""

    own_linear = False
    enters_modules = False

    def gradient_bytes(self, name: str) -> int:
        """Of a parameter's gradient as autograd makes it; 0 for a frozen one, or to count none."""
        return 0

    def before_module(self, ledger: Ledger, module: str) -> None:
        """The parameters of `module` are about to be used."""

    def after_module(self, ledger: Ledger, module: str) -> None:
        """They have been used."""

    def after_forward(self, ledger: Ledger) -> None:
        """The forward pass is over."""

    def part_of_gradient(self, ledger: Ledger, name: str) -> None:
        """The first part of a parameter's gradient has come, of several that are added up before it is complete."""

    def gradient(self, ledger: Ledger, name: str) -> None:
        """A parameter's gradient of this micro-batch is complete, and in `ledger` as "temporary"."""


class Pass:
    """One micro-batch forward and backward."""

    def __init__(self, tape: Tape, ledger: Ledger, engine: Engine) -> None:
        self.tape, self.ledger, self.engine = tape, ledger, engine
        self.program = program_of(tape, engine.enters_modules)
        self.waiting: dict[str, int] = {}  # gradients received so far, of weights used more than once

    def forward(self) -> None:
        self._play("forward", self.tape.segments, self.program.forward)

    def backward(self) -> None:
        self._play("backward", reversed(self.tape.segments), reversed(self.program.backward))

    def evaluate(self, phase: str = "evaluation") -> None:
        """Forward only, without gradients."""
        self._play(phase, self.tape.segments, evaluation_of(self.tape, self.engine.enters_modules))

    def _play(self, phase: str, segments: Iterable[Segment], events: Iterable[list[Event]]) -> None:
        self.ledger.phase = phase
        for segment, its_events in zip(segments, events, strict=True):
            self.ledger.place = segment.name
            for event in its_events:
                if isinstance(event, Stretch):
                    self.ledger.run(event)
                else:
                    self._step_in(event[0], segment.ops[event[1]])
            if phase != "evaluation":
                self.ledger.mark(segment.name)

    def _step_in(self, kind: Kind, op: Op) -> None:
        if kind is Kind.BEFORE:
            self.engine.before_module(self.ledger, op.module)
        elif kind is Kind.AFTER:
            self.engine.after_module(self.ledger, op.module)
        else:
            turned = self.engine.own_linear and op.name == "linear"
            for name in reversed(op.weights) if turned else op.weights:
                if size := self.engine.gradient_bytes(name):
                    if kind is Kind.MADE:
                        self.ledger.take(TEMPORARY, size, op.name)
                        if op.name == TILED_MLP:
                            self.engine.part_of_gradient(self.ledger, name)
                    else:
                        self._hand_on(name, size)

    def _hand_on(self, name: str, size: int) -> None:
        """A tied weight's once, when all its gradients are there: later ones are added to the first."""
        uses = self.program.uses[name]
        if uses > 1:
            come = self.waiting.get(name, 0) + 1
            self.waiting[name] = come % uses
            if come > 1:
                self.ledger.give(TEMPORARY, size)
            if come < uses:
                return
        self.engine.gradient(self.ledger, name)
