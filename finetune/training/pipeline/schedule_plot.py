"""A pipeline's step as a picture: a lane a stage, work numbered by micro-batch, planned above measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from finetune.plan.schedule import BACKWARD, FORWARD, IDLE, RECEIVE, SEND, Schedule, bubble_share
from finetune.training.pipeline.trace import Recorder, intervals_of, measured, plan_from
from finetune.training.run_folder import write_json

COLOURS = {FORWARD: "#2a6f97", BACKWARD: "#e07a30", SEND: "#5b8c5a", RECEIVE: "#a7c957", IDLE: "#eceff1"}
LANE_INCHES, SMALLEST_LABELLED = 0.42, 0.012  # the latter as a share of the picture's width


def note_schedule(trainer: Any, recorder: Recorder) -> None:
    """What the first pipeline did: from the first of two steps the plan, from the second the picture of both."""
    stages = intervals_of(recorder, trainer.grid, trainer.parts.stages)
    if not trainer.launch.speaks:
        return
    found = measured(stages, trainer.micro_batches)
    if trainer.state.global_step + 1 < trainer.schedule_step:
        trainer.planned = plan_from(found)
    else:
        write_schedule(Path(trainer.args.output_dir), trainer.planned, found)


def write_schedule(folder: Path, planned: Schedule, measured: Schedule) -> None:
    """`schedule.png` and `schedule.json` in a run folder."""
    figure = plot_schedules([("planned from the step before", planned), ("measured", measured)])
    figure.savefig(folder / "schedule.png", dpi=120)
    ideal = bubble_share(planned.stages, planned.micro_batches)
    record: dict[str, Any] = {"ideal_bubble_share": ideal}
    for name, schedule in (("planned", planned), ("measured", measured)):
        record[name] = {
            "makespan_seconds": schedule.makespan,
            "bubble_share": schedule.bubble_share,
            "in_flight": schedule.in_flight,
            "events": [asdict(event) for event in schedule.events],
        }
    write_json(folder / "schedule.json", record)


def plot_schedules(named: list[tuple[str, Schedule]]) -> Figure:
    """One panel a schedule, on one axis of time in milliseconds."""
    lanes = max(schedule.stages for _, schedule in named)
    figure = Figure(figsize=(11, len(named) * (LANE_INCHES * lanes + 0.75) + 0.6), layout="constrained")
    panels: Any = figure.subplots(len(named), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(max(event.end for event in schedule.events) for _, schedule in named)
    for axes, (name, schedule) in zip(panels, named, strict=True):
        _draw(axes, schedule, longest)
        share = f"{schedule.makespan * 1e3:.0f} ms, {schedule.bubble_share:.0%} of it neither forward nor backward"
        axes.set_title(f"{name}: {share}", loc="left", fontsize=10)
    panels[-1].set_xlabel("milliseconds since the step began")
    kinds = (FORWARD, BACKWARD, SEND, RECEIVE, IDLE)
    handles = [Patch(facecolor=COLOURS[kind], edgecolor="#b0b7bd", linewidth=0.4, label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=9)
    return figure


def _draw(axes: Any, schedule: Schedule, longest: float) -> None:
    end = max(event.end for event in schedule.events)
    for stage in range(schedule.stages):
        axes.barh(stage, end * 1e3, height=0.8, color=COLOURS[IDLE], zorder=1)
    for event in schedule.events:
        if event.kind == IDLE:
            continue
        width = (event.end - event.start) * 1e3
        is_work = event.kind in (FORWARD, BACKWARD)
        edge = {"edgecolor": "white", "linewidth": 0.6} if is_work else {"linewidth": 0}
        axes.barh(event.stage, width, left=event.start * 1e3, height=0.8, color=COLOURS[event.kind], zorder=2, **edge)
        if is_work and event.end - event.start > SMALLEST_LABELLED * longest * (1 + (event.micro_batch > 9)):
            middle = (event.start + event.end) / 2 * 1e3
            axes.text(middle, event.stage, str(event.micro_batch), ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1e3 * 1.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
