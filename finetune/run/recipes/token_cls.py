"""recipes/token_cls.py: tags words of sentences, and reads entities from the tags."""

from __future__ import annotations

from finetune.run.decoders import refuse_writer
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ClassArguments, ModelArguments, PreparationArguments, TokenDataArguments
from finetune.run.recipe import USUAL, Recipe
from finetune.run.recipes import TRAINER_GROUPS
from finetune.run.task import Task

TOKEN_CLS = Recipe(
    name="token_cls",
    task=Task("token-classification", "AutoModelForTokenClassification", "TOKEN_CLS", refuse_writer),
    groups=(
        ModelArguments,
        AdapterArguments,
        TokenDataArguments,
        PreparationArguments,
        ClassArguments,
        *TRAINER_GROUPS,
    ),
    defaults={**USUAL, "output_dir": "runs/token_cls"},
    figures=("loss", "precision", "recall", "f1", "accuracy"),
    metrics=("entity_f1",),
    # A model from scratch needs a higher rate than a pretrained one, and many steps: it learns what words mean in the
    # first epoch, and to look at their neighbors in the second and third.
    scratch_defaults={
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-3,
        "num_train_epochs": 4,
        "warmup_steps": 0.1,
        "ddp_find_unused_parameters": False,
    },
)
