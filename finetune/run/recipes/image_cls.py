"""recipes/image_cls.py: image classification, with the Trainer or, for an AlexNet, as a pipeline."""

from __future__ import annotations

from finetune.run.flags.common import RunArguments
from finetune.run.flags.compression import CompressionArguments
from finetune.run.flags.guards import GuardArguments
from finetune.run.flags.images import AugmentationArguments, ImageArguments, ImageModelArguments
from finetune.run.flags.pipeline import PipelineArguments
from finetune.run.flags.profiling import ProfileArguments
from finetune.run.flags.text import ClassArguments, PreparationArguments
from finetune.run.recipe import PIPELINE, TRAINER, USUAL, Recipe
from finetune.run.task import Task

IMAGE_CLS = Recipe(
    name="image_cls",
    task=Task("image-classification", "AutoModelForImageClassification"),
    groups=(
        ImageModelArguments,
        ImageArguments,
        PreparationArguments,
        AugmentationArguments,
        ProfileArguments,
        RunArguments,
        GuardArguments,
    ),
    engines=(TRAINER, PIPELINE),
    trainer_groups=(ClassArguments, CompressionArguments),
    pipeline_groups=(PipelineArguments,),
    figures=("loss", "accuracy", "f1_macro", "matthews"),
    metrics=("accuracy", "f1", "matthews", "mse", "pearson"),
    defaults={
        **USUAL,
        "output_dir": "runs/image_cls",
        "per_device_eval_batch_size": 64,  # small images, and no activations to keep
        "ddp_broadcast_buffers": False,  # SharedStatistics averages batch norm's buffers instead
    },
    # A model from scratch needs a higher rate and more epochs than a pretrained one.
    scratch_defaults={
        "learning_rate": 3e-3,
        "num_train_epochs": 8,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "cosine",
        "ddp_find_unused_parameters": False,
    },
)
