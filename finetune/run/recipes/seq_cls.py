"""recipes/seq_cls.py: classification or regression of texts, or of pairs of texts."""

from __future__ import annotations

from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.distillation import DistillArguments
from finetune.run.flags.text import ClassArguments, DataArguments, ModelArguments, PreparationArguments
from finetune.run.recipe import USUAL, Recipe
from finetune.run.recipes import TRAINER_GROUPS
from finetune.run.task import TEXT_CLASSIFICATION

SEQ_CLS = Recipe(
    name="seq_cls",
    task=TEXT_CLASSIFICATION,
    groups=(
        ModelArguments,
        AdapterArguments,
        DataArguments,
        PreparationArguments,
        ClassArguments,
        DistillArguments,
        *TRAINER_GROUPS,
    ),
    defaults={**USUAL, "output_dir": "runs/seq_cls"},
    figures=("loss", "accuracy", "f1_macro", "matthews", "mse", "pearson", "f1_micro", "subset_accuracy"),
    metrics=("accuracy", "f1", "matthews", "mse", "pearson"),
    # A model from scratch needs a higher rate and more epochs than a pretrained one.
    scratch_defaults={
        "learning_rate": 1e-3,
        "num_train_epochs": 8,
        "warmup_steps": 0.1,
        "ddp_find_unused_parameters": False,
    },
)
