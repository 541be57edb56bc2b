"""recipes/token_cls.py: the words of sentences to tags, and these to entities."""

from __future__ import annotations

from finetune.run.flags.common import RunArguments
from finetune.run.flags.compression import CompressionArguments
from finetune.run.flags.guards import GuardArguments
from finetune.run.flags.profiling import ProfileArguments
from finetune.run.flags.text import ClassArguments, ModelArguments, PreparationArguments, TokenDataArguments
from finetune.run.recipe import USUAL, Recipe

TOKEN_CLS = Recipe(
    name="token_cls",
    task="token-classification",
    groups=(
        ModelArguments,
        TokenDataArguments,
        PreparationArguments,
        ClassArguments,
        ProfileArguments,
        RunArguments,
        CompressionArguments,
        GuardArguments,
    ),
    defaults={**USUAL, "output_dir": "runs/token_cls"},
    # A model from scratch wants a higher rate than a pretrained one.
    scratch_defaults={"learning_rate": 1e-3, "num_train_epochs": 3, "warmup_steps": 0.1},
)
