"""A pipeline's step as a picture: a lane a stage, work numbered by micro-batch, planned above measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.plan.schedule import Schedule, bubble_share
from finetune.report.plan_pictures import lanes
from finetune.report.shapes import WIDE
from finetune.report.svg import write_png
from finetune.training.pipeline.trace import Recorder, intervals_of, measured, plan_from
from finetune.training.run_folder import write_json


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
