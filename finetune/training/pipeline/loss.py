"""What DeepSpeed calls on the last stage: the loss of a micro-batch, as its share of the global batch's."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import distributed

from finetune.models.pipeline import PipelineModel
from finetune.training.guards.nan_guard import poisoned


class StageLoss:
    """In training, the micro-batch's summed loss by the items of the whole global batch. DeepSpeed takes the mean over
    micro-batches and data-parallel ranks; `shares` of them undo that. In evaluation, sums of the rows' figures gather
    in `figures`, in float64."""

    def __init__(self, model: PipelineModel, shares: int) -> None:
        self.model, self.shares = model, shares
        self.items: Any = 1
        self.figures: torch.Tensor | None = None
        self.real_rows: deque[int] | None = None  # of each micro-batch of an evaluation, in order; None in training

    def count(self, labels: list[Any], group: Any, device: torch.device) -> None:
        """The items of this pipeline's micro-batches of a step, and of the other pipelines' in `group`."""
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
        return sums.new_zeros(())  # which DeepSpeed adds up, and nobody reads


def _first_rows(values: Any, count: int) -> Any:
    """Of a tensor, or of each in a tuple: what comes behind fills up the last batch."""
    return tuple(value[:count] for value in values) if isinstance(values, tuple) else values[:count]
