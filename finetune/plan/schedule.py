"""A pipeline's schedule, simulated: when each stage runs each micro-batch forward and backward, and when it waits.

    plan = simulate(micro_batches=8, forward_seconds=[1, 1, 1, 1], backward_seconds=[2, 2, 2, 2])
    plan.bubble_share  # 3 / 11: (P - 1) / (M + P - 1)
    plan.in_flight     # [4, 3, 2, 1]: the peak number of micro-batches whose activations a stage holds

1F1B: Narayanan et al., arXiv 1806.03377, section 3.2, with a flush at the end of each step, as in DeepSpeed's engine
(runtime/pipe/schedule.py, TrainSchedule).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

FORWARD, BACKWARD, SEND, RECEIVE, IDLE = "forward", "backward", "send", "receive", "idle"


@dataclass(frozen=True)
class Event:
    """What a stage does from `start` to `end` (seconds from the start of the step), and for which micro-batch."""

    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """One training step of a pipeline, planned or measured. Events of a stage are in order and do not overlap."""

    stages: int
    micro_batches: int
    events: tuple[Event, ...]

    @property
    def makespan(self) -> float:
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    def seconds(self, stage: int, *kinds: str) -> float:
        """Time that `stage` spends in events of these kinds."""
        return sum(e.end - e.start for e in self.events if e.stage == stage and e.kind in kinds)

    @property
    def bubble_share(self) -> float:
        """The share of all stages' time in which they are not computing."""
        busy = sum(self.seconds(stage, FORWARD, BACKWARD) for stage in range(self.stages))
        return 1 - busy / (self.stages * self.makespan)

    @property
    def in_flight(self) -> list[int]:
        """Per stage, the most micro-batches between their forward and backward pass: it holds their activations."""
        ordered, change = sorted(self.events, key=lambda e: e.start), {FORWARD: 1, BACKWARD: -1}
        changes = ([change.get(e.kind, 0) for e in ordered if e.stage == stage] for stage in range(self.stages))
        return [max(accumulate(its, initial=0)) for its in changes]


def bubble_share(stages: int, micro_batches: int) -> float:
    """(P - 1) / (M + P - 1): the idle share of a pipeline with equal stages, without communication (arXiv 1811.06965,
    section 2.3)."""
    return (stages - 1) / (micro_batches + stages - 1)


def order_of(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What `stage` runs, in order: (kind, micro-batch). 1F1B delays forward passes: a stage at distance d from the last
    runs d of them ahead, then alternates."""
    forwards = [(FORWARD, m) for m in range(micro_batches)]
    backwards = [(BACKWARD, m) for m in range(micro_batches)]
    ahead = min(stages - 1 - stage, micro_batches)
    order = forwards[:ahead]
    for m in range(micro_batches - ahead):
        order += [forwards[ahead + m], backwards[m]]
    return order + backwards[micro_batches - ahead :]


def instructions(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """`order_of` with the transfers in between: (kind, micro-batch), where transfers are "send down" and "receive down"
    (of activations), "send up" and "receive up" (of gradients). In the order of DeepSpeed's TrainSchedule: before a
    backward pass the gradient is received first, and only then the output of the preceding forward pass is sent."""
    todo: list[tuple[str, int]] = []
    waiting: tuple[str, int] | None = None  # a transfer that the last computation still has to make
    for kind, m in order_of(stage, stages, micro_batches):
        needs = ("receive down", m) if kind == FORWARD else ("receive up", m)
        has_source = stage > 0 if kind == FORWARD else stage < stages - 1
        receive = [needs] if has_source else []
        send = [waiting] if waiting else []
        full = waiting == ("send down", m + stages - 1 - stage)  # no DeepSpeed step lies between the two
        todo += [*receive, *send] if kind == BACKWARD and full else [*send, *receive]
        todo.append((kind, m))
        has_target = stage < stages - 1 if kind == FORWARD else stage > 0
        waiting = (("send down", m) if kind == FORWARD else ("send up", m)) if has_target else None
    return [*todo, waiting] if waiting else todo


def simulate(
    micro_batches: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfer_seconds: float = 0.0,
) -> Schedule:
    """A step of `micro_batches` through stages that take `forward_seconds[s]` and `backward_seconds[s]` for each.

    `transfer_seconds`: to send one micro-batch's activations, or its gradients, to the neighbour. It holds up sender
    and receiver, as DeepSpeed's blocking send and receive do (runtime/pipe/p2p.py). A sender waits for a neighbour that
    is busy, because the two must meet.
    """
    stages = len(forward_seconds)
    assert len(backward_seconds) == stages >= 1
    assert micro_batches >= 1
    todo = [instructions(s, stages, micro_batches) for s in range(stages)]
    clock, at, events = [0.0] * stages, [0] * stages, []
    work = {FORWARD: forward_seconds, BACKWARD: backward_seconds}
    while any(at[s] < len(todo[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            while at[s] < len(todo[s]) and todo[s][at[s]][0] in work:
                kind, m = todo[s][at[s]]
                events.append(Event(s, kind, m, clock[s], clock[s] + work[kind][s]))
                clock[s], at[s], moved = events[-1].end, at[s] + 1, True
        for s in range(stages - 1):
            # A transfer happens when both neighbours have reached it: s sends activations down, s + 1 gradients up.
            while at[s] < len(todo[s]) and at[s + 1] < len(todo[s + 1]):
                (here, m), (there, n) = todo[s][at[s]], todo[s + 1][at[s + 1]]
                if (here, there, m) not in (("send down", "receive down", n), ("receive up", "send up", n)):
                    break
                start = max(clock[s], clock[s + 1])
                down = here == "send down"
                for stage, kind in ((s, SEND if down else RECEIVE), (s + 1, RECEIVE if down else SEND)):
                    if start > clock[stage]:
                        events.append(Event(stage, IDLE, m, clock[stage], start))
                    if transfer_seconds:
                        events.append(Event(stage, kind, m, start, start + transfer_seconds))
                    clock[stage], at[stage] = start + transfer_seconds, at[stage] + 1
                moved = True
        assert moved, "the schedule's neighbours wait for one another"
    end = max(clock)
    events += [Event(s, IDLE, -1, clock[s], end) for s in range(stages) if clock[s] < end]
    return Schedule(stages, micro_batches, tuple(sorted(events, key=lambda e: (e.stage, e.start))))
