"""What ZeRO-3 gathers and reduces in a micro-batch, in which order: its engine played with nobody counting bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from finetune.plan.engines.resident import Weights
from finetune.plan.engines.zero3 import Zero3
from finetune.plan.optimizers import Optimizer
from finetune.plan.program import Stretch
from finetune.plan.step import Ledger, Pass
from finetune.plan.tape import Tape
from finetune.plan.zero import Zero


@dataclass(frozen=True)
class Gather:
    phase: str
    elements: int
    parameters: int


@dataclass(frozen=True)
class Played:
    gathers: tuple[Gather, ...]
    reduced: tuple[tuple[int, ...], ...]  # elements of each gradient of each bucket
    persistent: tuple[int, ...]


class _Silent(Ledger):
    """Counts nothing: only what is asked for matters here."""

    def take(self, kind: str, size: int, where: str = "") -> None:
        pass

    def give(self, kind: str, size: int) -> None:
        pass

    def run(self, stretch: Stretch) -> None:
        pass


class _Recorder(Zero3):
    def __init__(self, weights: Weights, zero: Zero, ranks: int) -> None:
        super().__init__(weights, zero, Optimizer("sgd"), ranks, 0, Ledger())
        self.here = set(self.persistent)
        self.asked_for: list[Gather] = []
        self.reduced: list[tuple[int, ...]] = []
        self.phase = "forward"

    def before_module(self, ledger: Ledger, module: str, phase: str) -> None:
        self.phase = phase
        super().before_module(ledger, module, phase)

    def _gather(self, ledger: Ledger, names: list[str], where: str) -> None:
        if names:
            self.asked_for.append(Gather(self.phase, sum(self.pieces[n] * self.ranks for n in names), len(names)))
            self.live += sum(self.elements[name] for name in names)
            self.here.update(names)

    def _reduce(self, ledger: Ledger) -> None:
        if self.filled:
            self.reduced.append(tuple(self.pieces[name] * self.ranks for name in self.filled))
            self.filled.clear()
            self.full = 0


def what_gathers_hang_on(zero: Zero) -> Zero:
    """And nothing else, so that layouts which gather alike are played once."""
    return Zero(stage=3, reduce_bucket_size=zero.reduce_bucket_size, prefetch_bucket_size=zero.prefetch_bucket_size,
                persistence_threshold=zero.persistence_threshold, max_live_parameters=zero.max_live_parameters,
                max_reuse_distance=zero.max_reuse_distance)  # fmt: skip


@lru_cache(maxsize=128)
def gathers(tape: Tape, weights: Weights, zero: Zero, ranks: int) -> Played:
    """One micro-batch: what is gathered, forward and backward, and reduced in which buckets."""
    layout, ledger = _Recorder(weights, zero, ranks), _Silent()
    layout.trace(tape)
    layout.begin(ledger, True, True)
    passed = Pass(tape, ledger, layout, layout.gradient_bytes)
    passed.forward()
    passed.backward()
    layout.end(ledger)
    kept = tuple(layout.elements[name] for name in sorted(layout.persistent))
    return Played(tuple(layout.asked_for), tuple(layout.reduced), kept)
