"""What classifier pipelines share: one class id per row, and cross entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.models.pipeline import PipelineLayer, PipelineModel


def classifier_pipeline(
    kind: type[PreTrainedModel],
    config: Any,
    layers: Sequence[PipelineLayer],
    figures: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> PipelineModel:
    """The `layers` of a model of class `kind` for `finetune.training.pipeline`."""
    with torch.device("meta"):
        total = kind(config).num_parameters()
    return PipelineModel(
        layers=layers,
        split=partial(split_batch, str(kind.main_input_name)),
        loss=summed_loss,
        items=count_labels,
        figures=figures,
        multiplied_parameters=total,
        config=config,
        save=partial(save_config, kind, config),
    )


def split_batch(first: str, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first stage's input and the last stage's targets."""
    return batch[first], batch["labels"]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats, summed over rows: logits (B, classes), labels (B)."""
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """The number of rows, as a 0-d tensor."""
    return torch.tensor(labels.numel())


def save_config(kind: type[PreTrainedModel], config: Any, folder: Path) -> None:
    """Write what `save_pretrained` writes beside the weights."""
    config.architectures, config.dtype = [kind.__name__], torch.float32
    config.save_pretrained(folder)
