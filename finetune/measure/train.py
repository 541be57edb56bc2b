"""Run the real training code, the Trainer or the pipeline trainer, on a given model and synthetic samples."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, default_data_collator

from finetune.measure.watch import Watch
from finetune.models.pipeline import PipelineModel
from finetune.run.flags.pipeline import PipelineArguments
from finetune.training.pipeline.partition import partition
from finetune.training.pipeline.trainer import PipelineTrainer
from finetune.training.start import Session
from finetune.training.trainer import FinetuneTrainer


def train(session: Session, model: Any, data: Any, watch: Watch, *others: TrainerCallback) -> None:
    """Train with the Trainer, under the session's engine; `others` are callbacks besides the watch."""
    trainer = FinetuneTrainer(
        model=model,
        args=session.training,
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[watch, *others],
        sequence_parallel_size=session.run.sequence_parallel_size,
        expert_parallel_size=session.run.expert_parallel_size,
    )
    watch.follow(model)
    trainer.train(resume_from_checkpoint=session.checkpoint)


def train_pipeline(
    session: Session,
    model: PipelineModel,
    arguments: PipelineArguments,
    data: Any,
    interval: int,
    watch: Watch,
    *others: TrainerCallback,
) -> None:
    """Train with DeepSpeed's pipeline engine; `watch.bounds` gets the stage boundaries."""
    with torch.no_grad():
        parts = partition(model, arguments, session.training, session.launch, data, default_data_collator, interval)
    trainer = PipelineTrainer(
        model,
        parts,
        args=session.training,
        ds_config=session.ds_config or {},
        launch=session.launch,
        train_dataset=data,
        eval_dataset=None,
        data_collator=default_data_collator,
        processing_class=None,
        compute_metrics=None,
        callbacks=[watch, *others],
        checkpoint_interval=interval,
    )
    watch.follow(trainer.engine.module)
    with trainer.watched():
        trainer.train()
    watch.bounds = list(parts.bounds)
