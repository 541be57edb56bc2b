"""Forward passes through a pipeline: of the whole evaluation set, or of a step's batches once more."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import distributed
from transformers import EvalPrediction
from transformers.trainer_utils import speed_metrics

from finetune.training.pipeline.batches import EvaluationShard
from finetune.training.speed import wall_clock


def evaluated(trainer: Any) -> dict[str, float]:
    """The figures over the whole evaluation set, the same on every rank."""
    start = time.monotonic()
    sums, batches = whole_set(trainer)
    metrics = trainer.compute_metrics(EvalPrediction(predictions=sums, label_ids=None))
    figures: dict[str, float] = {f"eval_{name}": value for name, value in metrics.items()}
    samples = len(trainer.eval_dataset)
    return {**figures, **speed_metrics("eval", wall_clock(start), num_samples=samples, num_steps=batches)}


def whole_set(trainer: Any) -> tuple[Any, int]:
    """The sums of the figures over the evaluation set of a PipelineTrainer, (1, k), the same on every rank, and how
    many batches a pipeline took. All ranks must call it."""
    args, engine, loss = trainer.args, trainer.engine, trainer.loss
    shard = EvaluationShard(len(trainer.eval_dataset), args.eval_batch_size, trainer.pipeline, trainer.pipelines)
    batches = None
    if trainer.is_first or trainer.is_last:
        batches = map(trainer.model.split, trainer.loader(trainer.eval_dataset, shard))
    loss.real_rows, loss.figures = deque(shard.real_rows), None
    if not trainer.dynamic:
        engine.reset_activation_shape()  # an evaluation's batches have a size of their own
    engine.eval_batch(batches, reduce_output=None, bcast_loss=False, num_micro_batches=len(shard))
    if not trainer.dynamic:
        engine.reset_activation_shape()
    return _from_last_stage(trainer, loss.figures), len(shard)


def _from_last_stage(trainer: Any, figures: torch.Tensor | None) -> Any:
    """Summed over pipelines, and told to every rank."""
    grid = trainer.grid
    if trainer.is_last:
        assert figures is not None
        distributed.all_reduce(figures, group=grid.get_data_parallel_group())
    told = [figures.cpu() if figures is not None else None]
    distributed.broadcast_object_list(told, src=grid.stage_to_global(trainer.parts.stages - 1, data=0))
    assert told[0] is not None
    return told[0].numpy()[None]


def forward(trainer: Any, batches: list[dict[str, Any]]) -> None:
    """The micro-batches of a step, without a step; on all ranks."""
    rows = [len(next(iter(batch.values()))) for batch in batches] or [0] * trainer.micro_batches
    trainer.loss.real_rows, trainer.loss.figures = deque(rows), None
    pairs = map(trainer.model.split, batches) if trainer.is_first or trainer.is_last else None
    micro_batches = trainer.micro_batches
    trainer.engine.eval_batch(pairs, reduce_output=None, bcast_loss=False, num_micro_batches=micro_batches)
    trainer.loss.figures = None


def note_best(args: Any, state: Any, metrics: dict[str, float]) -> bool:
    """Whether this evaluation is the best so far, by --metric_for_best_model."""
    if args.metric_for_best_model is None:
        return False
    value = metrics[f"eval_{args.metric_for_best_model.removeprefix('eval_')}"]
    best = state.best_metric
    if best is not None and not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True
