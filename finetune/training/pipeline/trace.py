"""Records what each stage did in one step (forward, backward, send, receive, idle) as a schedule, and draws the planned
schedule above the measured one: one lane per stage, work numbered by micro-batch."""

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
from finetune.report.png import write_png
from finetune.report.shapes import WIDE
from finetune.training.checkpoints.writing import every
from finetune.training.pipeline.costs import now
from finetune.training.run_folder import write_json

Interval = tuple[float, float]  # seconds since the step began, on this rank


# Our names for DeepSpeed's instructions; and for each transfer, its counterpart and the neighbor that performs it.
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
    """Times the instructions of one rank's DeepSpeed engine, only in the recorded step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.intervals: list[tuple[str, Interval]] = []
        self._begin = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap one `train_batch`; fills `intervals`."""
        plain = self.engine._INSTRUCTION_MAP  # the class attribute; an instance attribute shadows it meanwhile
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
    """Extend each computation until the rank's next instruction: DeepSpeed accumulates gradients there, for example."""
    work = (FORWARD, BACKWARD)
    pairs = pairwise(found)
    closed = [(kind, (start, later if kind in work else end)) for (kind, (start, end)), (_, (later, _)) in pairs]
    return [*closed, *found[-1:]]


def measured(per_stage: list[list[tuple[str, Interval]]], micro_batches: int) -> Schedule:
    """The combined schedule of one pipeline's stages. A transfer begins when both ends have reached it; before that, a
    stage waits. Assumes synchronized clocks, as on one machine."""
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
    """Intervals by kind and micro-batch: each kind's intervals come in micro-batch order."""
    done: Counter[str] = Counter()
    numbered = {}
    for kind, interval in found:
        numbered[kind, done[kind]] = interval
        done[kind] += 1
    return numbered


def plan_from(found: Schedule) -> Schedule:
    """The predicted schedule of a step if every micro-batch took the median times in `found`."""

    def typical(stage: int, *kinds: str) -> float:
        return median([e.end - e.start for e in found.events if e.stage == stage and e.kind in kinds] or [0.0])

    stages = range(found.stages)
    forward, backward = ([typical(stage, kind) for stage in stages] for kind in (FORWARD, BACKWARD))
    # Either end of a transfer may wait until the other process is scheduled, so the shorter time is more accurate.
    transfer = min(max(typical(stage, kind) for stage in stages) for kind in (SEND, RECEIVE))
    return simulate(found.micro_batches, forward, backward, transfer)


def note_schedule(trainer: Any, recorder: Recorder) -> None:
    """Record the first pipeline: the first of two steps gives the plan, the second the picture of both."""
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
