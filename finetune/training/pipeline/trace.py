"""What each stage really did in one step: forward, backward, send, receive, and nothing, in the form of a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any

from torch import distributed

from finetune.plan.schedule import BACKWARD, FORWARD, RECEIVE, SEND, Event, Schedule, instructions, simulate
from finetune.training.pipeline.costs import now

Interval = tuple[float, float]  # seconds since the step began, on this rank


# The instruction at the other end of a transfer, and on which neighbour.
OTHER_END = {
    "send down": ("receive down", 1),
    "receive down": ("send down", -1),
    "send up": ("receive up", -1),
    "receive up": ("send up", 1),
}


class Recorder:
    """Notes what one rank does, from outside: by hooks of the stage's module, of the gradients that come in and of the
    weights whose gradient is done, and by Python's own profiler, which tells of each call of DeepSpeed's `p2p.send` and
    `p2p.recv`. Nothing of it is there but in the step that is recorded, which takes a few per cent longer for it.
    """

    def __init__(self, module: Any, loss: Any, is_last: bool) -> None:
        self.module, self.loss, self.is_last = module, loss, is_last
        self.intervals: list[tuple[str, Interval]] = []
        self._begin = self._called = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around one `train_batch`; then `intervals` are there."""
        hooks = [
            self.module.register_forward_pre_hook(lambda *_: self._starts(FORWARD)),
            self.module.register_forward_hook(lambda *given: self._after_forward(given[-1], awaits=not self.is_last)),
            *(p.register_post_accumulate_grad_hook(lambda _: self._goes_on()) for p in self.module.parameters()),
        ]
        self.loss.watch = self._after_forward
        distributed.barrier()
        self._begin = now()
        sys.setprofile(self._watcher())
        try:
            yield
        finally:
            sys.setprofile(None)
            self.loss.watch = None
            for hook in hooks:
                hook.remove()
        self.intervals = _without_gaps(self.intervals)

    def _watcher(self) -> Any:
        from deepspeed.runtime.pipe import p2p

        kinds = {p2p.send.__code__: SEND, p2p.recv.__code__: RECEIVE}

        def watch(frame: FrameType, event: str, _: Any) -> None:
            kind = kinds.get(frame.f_code)
            if kind is None:
                return
            if event == "call":
                self._called = self._now()
            elif event == "return":
                self.intervals.append((kind, (self._called, self._now())))

        return watch

    def _after_forward(self, output: Any, awaits: bool = True) -> None:
        """The output, or on the last stage the loss made of it, is there: from here its gradient is awaited."""
        self._goes_on()
        first = output[0] if isinstance(output, tuple) else output
        if awaits and first.requires_grad:
            first.register_hook(lambda _: self._starts(BACKWARD))

    def _starts(self, kind: str) -> None:
        now = self._now()
        self.intervals.append((kind, (now, now)))

    def _goes_on(self) -> None:
        kind, (start, _) = self.intervals[-1]
        self.intervals[-1] = (kind, (start, self._now()))

    def _now(self) -> float:
        return now() - self._begin


def _without_gaps(found: list[tuple[str, Interval]]) -> list[tuple[str, Interval]]:
    """A computation lasts until the rank does something else: DeepSpeed adds the gradients up there, for instance."""
    work = (FORWARD, BACKWARD)
    starts = [start for _, (start, _) in found[1:]]
    closed = [
        (kind, (start, later if kind in work else end))
        for (kind, (start, end)), later in zip(found, starts, strict=False)
    ]
    return [*closed, *found[-1:]]


def measured(per_stage: list[list[tuple[str, Interval]]], micro_batches: int) -> Schedule:
    """What the stages of one pipeline did, put together. A transfer begins when both ends have come to it: before that
    a stage waits. On one machine the clocks of all ranks run alike."""
    stages = len(per_stage)
    placed = [_placed(found, stage, stages, micro_batches) for stage, found in enumerate(per_stage)]
    events = []
    for stage, found in enumerate(placed):
        for (kind, m), (start, end) in found.items():
            if kind in OTHER_END:
                other, step = OTHER_END[kind]
                there = placed[stage + step].get((other, m))
                if there and there[0] < end:
                    start = max(start, there[0])
            events.append(Event(stage, kind.split()[0], m, start, end))
    return Schedule(stages, micro_batches, tuple(sorted(events, key=lambda e: (e.stage, e.start))))


def plan_from(found: Schedule) -> Schedule:
    """A step as it should go, if every micro-batch took what the median one took in `found`."""

    def typical(stage: int, *kinds: str) -> float:
        return median([e.end - e.start for e in found.events if e.stage == stage and e.kind in kinds] or [0.0])

    stages = range(found.stages)
    forward, backward = ([typical(stage, kind) for stage in stages] for kind in (FORWARD, BACKWARD))
    # Either end of a transfer may wait for the other's process to run; the shorter one is nearer to what it takes.
    transfer = min(max(typical(stage, kind) for stage in stages) for kind in (SEND, RECEIVE))
    return simulate("1f1b", found.micro_batches, forward, backward, transfer)


def _placed(
    found: list[tuple[str, Interval]], stage: int, stages: int, micro_batches: int
) -> dict[tuple[str, int], Interval]:
    """Which instruction of the schedule each interval was. A transfer may be of several tensors: between two
    computations there is at most one instruction that sends and one that receives."""
    placed: dict[tuple[str, int], Interval] = {}
    at = 0
    for kind, m in instructions("1f1b", stage, stages, micro_batches):
        if kind in (FORWARD, BACKWARD):
            while at < len(found) and found[at][0] not in (FORWARD, BACKWARD):
                at += 1
            if at < len(found):
                placed[kind, m] = found[at][1]
                at += 1
            continue
        gap = []
        for what, interval in found[at:]:
            if what in (FORWARD, BACKWARD):
                break
            gap.append((what, interval))
        same = [interval for what, interval in gap if what == kind.split()[0]]
        if same:
            placed[kind, m] = (min(start for start, _ in same), max(end for _, end in same))
    return placed


def intervals_of(recorder: Recorder, grid: Any, stages: int) -> list[Any]:
    """What each stage of the first pipeline has recorded. All ranks must ask."""
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, recorder.intervals)
    return [every[grid.stage_to_global(stage, data=0)] for stage in range(stages)]
