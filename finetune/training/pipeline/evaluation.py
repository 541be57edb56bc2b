"""The loss that DeepSpeed calls on the last stage, and forward passes through a pipeline: over the evaluation set, or
over a step's batches again."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import distributed
from transformers import EvalPrediction
from transformers.trainer_utils import speed_metrics

from finetune.models.pipeline import PipelineModel
from finetune.training.guards.nan_guard import poisoned
from finetune.training.pipeline.batches import EvaluationShard, loader
from finetune.training.speed import wall_clock


class StageLoss:
    """In training, the micro-batch's summed loss divided by the items of the global batch. DeepSpeed averages over
    micro-batches and data-parallel ranks; multiplying by their number, `shares`, undoes that. In evaluation, the rows'
    metric sums are accumulated in `figures`, in float64."""

    def __init__(self, model: PipelineModel, shares: int) -> None:
        self.model, self.shares = model, shares
        self.items: Any = 1
        self.figures: torch.Tensor | None = None
        self.real_rows: deque[int] | None = None  # per micro-batch of an evaluation, in order; None in training

    def count(self, labels: list[Any], group: Any, device: torch.device) -> None:
        """Count the items in a step's micro-batches, over all pipelines in `group`."""
        items = torch.stack([self.model.items(some) for some in labels]).sum().to(device)
        if distributed.get_world_size(group) > 1:
            distributed.all_reduce(items, group=group)
        self.items = items.clamp(min=1)

    def __call__(self, outputs: Any, labels: Any) -> torch.Tensor:
        if self.real_rows is None:
            return poisoned(self.model.loss(outputs, labels) * (self.shares / self.items))
        real = self.real_rows.popleft()
        sums = self.model.figures(_first_rows(outputs, real), _first_rows(labels, real)).double().sum(dim=0)
        self.figures = sums if self.figures is None else self.figures + sums
        return sums.new_zeros(())  # DeepSpeed sums these, and nobody reads the sum


def _first_rows(values: Any, count: int) -> Any:
    """The first rows of a tensor, or of each tensor in a tuple: the rest is padding of the last batch."""
    return tuple(value[:count] for value in values) if isinstance(values, tuple) else values[:count]


def evaluated(trainer: Any) -> dict[str, float]:
    """The metrics over a PipelineTrainer's evaluation set, the same on every rank; all ranks must call it."""
    start, samples, engine, loss = time.monotonic(), len(trainer.eval_dataset), trainer.engine, trainer.loss
    shard = EvaluationShard(samples, trainer.args.eval_batch_size, trainer.pipeline, trainer.pipelines)
    batches = None
    if trainer.is_first or trainer.is_last:
        batches = map(trainer.model.split, loader(trainer, trainer.eval_dataset, shard))
    loss.real_rows, loss.figures = deque(shard.real_rows), None
    if not trainer.dynamic:
        engine.reset_activation_shape()  # evaluation batches have a different size
    engine.eval_batch(batches, reduce_output=None, bcast_loss=False, num_micro_batches=len(shard))
    if not trainer.dynamic:
        engine.reset_activation_shape()
    told: list[Any] = [None]
    if trainer.is_last:
        assert loss.figures is not None
        distributed.all_reduce(loss.figures, group=trainer.grid.get_data_parallel_group())
        told = [loss.figures.cpu().numpy()[None]]  # (1, k)
    distributed.broadcast_object_list(told, src=trainer.grid.stage_to_global(trainer.parts.stages - 1, data=0))
    metrics = trainer.compute_metrics(EvalPrediction(predictions=told[0], label_ids=None))
    figures: dict[str, float] = {f"eval_{name}": value for name, value in metrics.items()}
    return {**figures, **speed_metrics("eval", wall_clock(start), num_samples=samples, num_steps=len(shard))}


def forward(trainer: Any, batches: list[dict[str, Any]]) -> None:
    """Run the forward passes of a step's micro-batches, without the step. All ranks must call it."""
    loss, micro_batches = trainer.loss, trainer.micro_batches
    loss.real_rows = deque([len(next(iter(batch.values()))) for batch in batches] or [0] * micro_batches)
    loss.figures = None
    pairs = map(trainer.model.split, batches) if trainer.is_first or trainer.is_last else None
    trainer.engine.eval_batch(pairs, reduce_output=None, bcast_loss=False, num_micro_batches=micro_batches)
    loss.figures = None


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
