"""What each stage really did in one step: forward, backward, send, receive, and nothing, in the form of a plan;
and both in a picture: a lane a stage, work numbered by micro-batch, planned above measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch import distributed

from finetune.plan.schedule import BACKWARD, FORWARD, RECEIVE, SEND, Event, Schedule, bubble_share, simulate
from finetune.report.plan_pictures import lanes
from finetune.report.shapes import WIDE
from finetune.report.svg import write_png
from finetune.training.checkpoints.writing import every
from finetune.training.pipeline.costs import now
from finetune.training.run_folder import write_json

Interval = tuple[float, float]  # seconds since the step began, on this rank


# What DeepSpeed's instructions are called in a plan, and which is at the other end, on which neighbour.
KINDS = {
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "SendActivation": "send down",
    "RecvActivation": "receive down",
    "SendGrad": "send up",
    "RecvGrad": "receive up",
}
OTHER_END = {
    "send down": ("receive down", 1),
    "receive down": ("send down", -1),
    "send up": ("receive up", -1),
    "receive up": ("send up", 1),
}


class Recorder:
    """Notes what one rank does: the instructions of DeepSpeed's engine, timed in the step that is recorded alone."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.intervals: list[tuple[str, Interval]] = []
        self._begin = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around one `train_batch`; then `intervals` are there."""
        plain = self.engine._INSTRUCTION_MAP  # the class's; the engine gets one of its own meanwhile
        timed = {kind: self._timed(run, KINDS[kind.__name__]) for kind, run in plain.items() if kind.__name__ in KINDS}
        distributed.barrier()
        self._begin = now()
        self.engine._INSTRUCTION_MAP = plain | timed
        try:
            yield
        finally:
            del self.engine._INSTRUCTION_MAP
        self.intervals = _without_gaps(self.intervals)

    def _timed(self, run: Callable[..., None], kind: str) -> Callable[..., None]:
        def timed(engine: Any, *args: Any, **kwargs: Any) -> None:
            start = now() - self._begin
            run(engine, *args, **kwargs)
            self.intervals.append((kind, (start, now() - self._begin)))

        return timed


def _without_gaps(found: list[tuple[str, Interval]]) -> list[tuple[str, Interval]]:
    """A computation lasts until the rank does something else: DeepSpeed adds the gradients up there, for instance."""
    work = (FORWARD, BACKWARD)
    pairs = pairwise(found)
    closed = [(kind, (start, later if kind in work else end)) for (kind, (start, end)), (_, (later, _)) in pairs]
    return [*closed, *found[-1:]]


def measured(per_stage: list[list[tuple[str, Interval]]], micro_batches: int) -> Schedule:
    """What the stages of one pipeline did, put together. A transfer begins when both ends have come to it: before that
    a stage waits. On one machine the clocks of all ranks run alike."""
    placed = [_numbered(found) for found in per_stage]
    events = []
    for stage, found in enumerate(placed):
        for (kind, m), (start, end) in found.items():
            if kind in OTHER_END:
                other, step = OTHER_END[kind]
                there = placed[stage + step].get((other, m))
                if there and there[0] < end:
                    start = max(start, there[0])
            events.append(Event(stage, kind.split()[0], m, start, end))
    return Schedule(len(placed), micro_batches, tuple(sorted(events, key=lambda e: (e.stage, e.start))))


def _numbered(found: list[tuple[str, Interval]]) -> dict[tuple[str, int], Interval]:
    """Intervals by kind and micro-batch: those of a kind come in the order of these."""
    done: Counter[str] = Counter()
    numbered = {}
    for kind, interval in found:
        numbered[kind, done[kind]] = interval
        done[kind] += 1
    return numbered


def plan_from(found: Schedule) -> Schedule:
    """A step as it should go, if every micro-batch took what the median one took in `found`."""

    def typical(stage: int, *kinds: str) -> float:
        return median([e.end - e.start for e in found.events if e.stage == stage and e.kind in kinds] or [0.0])

    stages = range(found.stages)
    forward, backward = ([typical(stage, kind) for stage in stages] for kind in (FORWARD, BACKWARD))
    # Either end of a transfer may wait for the other's process to run; the shorter one is nearer to what it takes.
    transfer = min(max(typical(stage, kind) for stage in stages) for kind in (SEND, RECEIVE))
    return simulate(found.micro_batches, forward, backward, transfer)


def note_schedule(trainer: Any, recorder: Recorder) -> None:
    """What the first pipeline did: from the first of two steps the plan, from the second the picture of both."""
    recorded = every(recorder.intervals)
    if not trainer.launch.speaks:
        return
    ranks = [trainer.grid.stage_to_global(stage, data=0) for stage in range(trainer.parts.stages)]
    found = measured([recorded[rank] for rank in ranks], trainer.micro_batches)
    if trainer.state.global_step + 1 < trainer.schedule_step:
        trainer.planned = plan_from(found)
    else:
        _write_schedule(Path(trainer.args.output_dir), trainer.planned, found)


def _write_schedule(folder: Path, planned: Schedule, measured: Schedule) -> None:
    """`schedule.png` and `schedule.json` in a run folder."""
    pictures, record = [], dict[str, Any](ideal_bubble_share=bubble_share(planned.stages, planned.micro_batches))
    for name, schedule in (("planned", planned), ("measured", measured)):
        of = " from the step before" if schedule is planned else ""
        share = f"{schedule.makespan * 1e3:.0f} ms, {schedule.bubble_share:.0%} of it neither forward nor backward"
        pictures.append(lanes(schedule, f"{name}{of}: {share}", WIDE))
        record[name] = {
            "makespan_seconds": schedule.makespan,
            "bubble_share": schedule.bubble_share,
            "in_flight": schedule.in_flight,
            "events": [asdict(event) for event in schedule.events],
        }
    write_png(folder / "schedule.png", pictures)
    write_json(folder / "schedule.json", record)
