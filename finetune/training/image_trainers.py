"""recipes/image_cls.py by either engine: the model of the flags, and its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.models.images import ImageSource, build_image_classifier, image_pipeline, settled_image_config
from finetune.run.flags.images import ImageModelArguments
from finetune.run.flags.text import ClassArguments
from finetune.training.chapters import pipeline_of, trainer_of
from finetune.training.loss import loss_for, settle_loss_scaling
from finetune.training.start import Session
from finetune.training.statistics import SharedStatistics


def image_trainer(session: Session, source: ImageSource, data: Any, metrics: Any) -> Any:
    """The Trainer, or the pipeline's where --pipeline_parallel_size is given; both hold the same data and losses."""
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
    return trainer_of(session, model, data, compute_metrics=metrics, compute_loss=loss, callbacks=own)
