"""recipes/image_cls.py as a pipeline: the Trainer's calls, answered by DeepSpeed's pipeline engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.models.images import image_pipeline
from finetune.training.pipeline.partition import describe, partition
from finetune.training.pipeline.trainer import PipelineTrainer
from finetune.training.profiling.callback import profiling
from finetune.training.run_folder import MetricsFile
from finetune.training.trainer import early_stopping


class ImagePipelineTrainer(PipelineTrainer):
    """The model is a list of layers, of which each rank builds those of its stage. `session` has the recipe's
    arguments, `data` what `prepare_images` made, `source` and `config` say which model."""

    def __init__(self, session: Any, source: Any, data: Any, config: Any, metrics: Any) -> None:
        model_args, _, _, _, pipeline_args, profile_args, run_args, guards = session.arguments
        training, train = session.training, data.splits["train"]
        model = image_pipeline(model_args, source, config, training.seed)
        interval = run_args.activation_checkpoint_interval or 0
        parts = partition(
            model, pipeline_args, training, session.launch, train, data.collator, interval, session.checkpoint
        )
        session.say(*describe(parts))
        super().__init__(
            model,
            parts,
            args=training,
            ds_config=session.ds_config,
            launch=session.launch,
            train_dataset=train,
            eval_dataset=data.splits.get("validation"),
            data_collator=data.collator,
            processing_class=data.processor,
            compute_metrics=metrics,
            callbacks=[MetricsFile(), *profiling(profile_args), *early_stopping(run_args)],
            checkpoint_interval=interval,
            weights=Path(source.description).expanduser() if source.config is not None else None,
            schedule_step=pipeline_args.schedule_step,
            guards=guards,
        )
