"""For recipes/image_cls.py with either engine: the model, its trainer, and the running statistics of batch norms.

Each rank collects the running statistics of its own images. torch's DDP then overwrites them with rank 0's before each
forward pass, and DeepSpeed does nothing (0.19.8, runtime/engine.py, _broadcast_model: parameters only), so every rank
would evaluate a different model and rank 0's would be saved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback

from finetune.models.batch_norm import batch_norms
from finetune.models.images import ImageSource, build_image_classifier, image_pipeline, settled_image_config
from finetune.run.flags.images import ImageModelArguments
from finetune.run.flags.text import ClassArguments
from finetune.training.chapters import pipeline_of, trainer_of
from finetune.training.loss import loss_for, settle_loss_scaling
from finetune.training.start import Session

LEAST_SIDE = 128  # pixels, on a CPU


def image_trainer(session: Session, source: ImageSource, data: Any, metrics: Any) -> Any:
    """The Trainer, or with --pipeline_parallel_size the pipeline's trainer; both use the same data and losses."""
    arguments, training = session[ImageModelArguments], session.training
    config = settled_image_config(arguments, source, data, training.do_train)
    if session.run.stages is not None:
        layers = image_pipeline(arguments, source, config, training.seed)
        weights = Path(source.description).expanduser() if source.config is not None else None
        return pipeline_of(session, layers, data, compute_metrics=metrics, weights=weights)
    recomputes = bool(training.activation_checkpointing)
    model = build_image_classifier(arguments, source, config, data.account.side, training.seed, recomputes)
    settle_loss_scaling(model)
    counts = [data.account.label_counts.get(name, 0) for name in data.labels.names]
    weighting = session[ClassArguments].class_weights if training.do_train else "none"
    loss = loss_for(weighting, training.label_smoothing_factor, data.labels.task, counts)
    own = [SharedStatistics(model)]
    data = replace(data, channels_last=prefers_channels_last(training, data.account.side))
    return trainer_of(session, model, data, compute_metrics=metrics, compute_loss=loss, callbacks=own)


def prefers_channels_last(training: Any, side: int) -> bool:
    """Whether convolutions of pictures with `side` pixels are faster if the channels of a pixel lie side by side. A
    GPU's tensor cores read half precision so; for the rest see docs/results/channels_last.md."""
    return side >= LEAST_SIDE if training.device.type == "cpu" else bool(training.bf16 or training.fp16)


class SharedStatistics(TrainerCallback):
    """After each step, averages the running statistics of batch norms over ranks: the result is that of one rank whose
    batches have the ranks' average mean and variance. The ranks' micro-batches count as one, so momentum applies once;
    the variance is the one within ranks, without the differences between their means. Use it with
    `ddp_broadcast_buffers=False`."""

    def __init__(self, model: Any) -> None:
        self.norms = [norm for norm in batch_norms(model) if norm.running_mean is not None]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.norms or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        # Looked up at each step: moving or casting a module replaces its buffers (torch 2.13, nn/modules/module.py,
        # _apply).
        buffers: list[Any] = [buffer for norm in self.norms for buffer in (norm.running_mean, norm.running_var)]
        flat = torch.cat([buffer.float() for buffer in buffers])
        distributed.all_reduce(flat)
        means = (flat / distributed.get_world_size()).split([buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean)
