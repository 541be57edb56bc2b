"""recipes/causal_lm.py: a causal language model, trained from scratch, in full or with LoRA."""

from __future__ import annotations

from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.distillation import CachedTeacherArguments, DistillArguments
from finetune.run.flags.experts import ExpertArguments
from finetune.run.flags.language import (
    BlockArguments,
    CausalModelArguments,
    CorpusArguments,
    GeneratedAnswerArguments,
    SampleArguments,
)
from finetune.run.flags.sequence_parallel import SequenceParallelArguments, TileArguments
from finetune.run.recipe import FIGURES_OF_TEXTS, METRICS_OF_TEXTS, USUAL, Recipe
from finetune.run.recipes import TRAINER_GROUPS
from finetune.run.task import TEXT_GENERATION

LANGUAGE_FIGURES = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "token_accuracy")

CAUSAL_LM = Recipe(
    name="causal_lm",
    task=TEXT_GENERATION,
    figures=(*LANGUAGE_FIGURES, *FIGURES_OF_TEXTS),
    metrics=METRICS_OF_TEXTS,
    groups=(
        CausalModelArguments,
        AdapterArguments,
        CorpusArguments,
        BlockArguments,
        SequenceParallelArguments,
        TileArguments,
        ExpertArguments,
        SampleArguments,
        GeneratedAnswerArguments,
        DistillArguments,
        CachedTeacherArguments,
        *TRAINER_GROUPS,
    ),
    defaults={
        **USUAL,
        "output_dir": "runs/causal_lm",
        "num_train_epochs": 1,  # a pretrained model gains most in one epoch, then begins to memorize the text
        "logging_nan_inf_filter": False,  # a NaN should be visible, and filtering it synchronizes the GPU in each step
        "remove_unused_columns": False,  # labels are already shifted, under a name that no model's signature has
    },
    # A model from scratch needs a higher rate and more epochs than a pretrained one; the rate is for the size `tiny`.
    scratch_defaults={
        "learning_rate": 4e-3,
        "num_train_epochs": 8,
        "adam_beta2": 0.99,  # few tokens per step: the usual 0.999 would average over too many steps
        "warmup_steps": 0.05,
        "lr_scheduler_type": "cosine",
        "ddp_find_unused_parameters": False,  # a GPT-lite uses all its parameters
    },
)
