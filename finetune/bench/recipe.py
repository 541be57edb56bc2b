"""recipes/benchmark.py: one cell of a benchmark, which trains a model on synthetic samples for a few steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.bench.models import PRESETS
from finetune.measure.recipe import SHORT_RUN
from finetune.run.flag import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from finetune.run.flags.common import RunArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.profiling import ProfileArguments
from finetune.run.recipe import PIPELINE, TRAINER, Recipe


@dataclass
class BenchmarkArguments:
    """What to train, and for how long."""

    model: str = field(default="wide", metadata={"help": ", ".join(PRESETS)})
    scale: float = field(default=1.0, metadata={"help": "of the model's sizes; 1: as published", "range": POSITIVE})
    model_changes: str = field(default="{}", metadata={"help": 'sizes that no scale touches, such as {"layers": 4}'})
    measured_steps: int = field(default=5, metadata={"help": "steps that are timed", "range": AT_LEAST_ONE})
    unmeasured_steps: int = field(
        default=1, metadata={"help": "warm-up steps before them, after the watched ones", "range": NOT_NEGATIVE}
    )
    result_dir: str | None = field(default=None, metadata={"help": "where each rank writes its measurements"})


BENCHMARK = Recipe(
    name="benchmark",
    groups=(BenchmarkArguments, ProfileArguments, RunArguments),
    pipeline_groups=(PipelineArguments,),
    engines=(TRAINER, PIPELINE),
    defaults={
        **SHORT_RUN,
        "output_dir": "runs/benchmark",
        "logging_strategy": "steps",  # every step, for its loss
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 8,
        "seed": 42,
        "schedule_step": 0,  # recording a pipeline's step takes time of its own
    },
)
