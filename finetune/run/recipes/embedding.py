"""recipes/embedding.py: texts to vectors that are close if the texts mean the same; and its flags."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import AT_LEAST_ONE, FILE, NOT_NEGATIVE, POSITIVE, flag
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments, PreparationArguments, SequenceArguments
from finetune.run.on_resume import GOES_ON, NEVER, ROWS, VALUES
from finetune.run.recipe import USUAL, Recipe
from finetune.run.recipes import TRAINER_GROUPS
from finetune.run.task import Task

POOLINGS = ("mean", "cls", "last")


@dataclass
class EmbeddingDataArguments(SequenceArguments):
    """What to train on. Without these, the first lines of docstrings and the functions that they describe are used."""

    test_file: str | None = flag(None, "file to evaluate the final model on, in the same format", GOES_ON, path=FILE)
    column_mapping: list[str] | None = flag(
        None, "names of columns in your files, e.g. title=anchor body=positive", ROWS, pairs=True
    )
    query_prompt: str | None = flag(
        None, "text to put before each anchor, such as 'query: '; default: the model's", ROWS
    )
    document_prompt: str | None = flag(
        None, "text to put before all other texts, such as 'passage: '; default: the model's", ROWS
    )


@dataclass
class EmbeddingArguments:
    """How texts become vectors, and how these are trained (docs/embedding.md)."""

    pooling: str | None = flag(
        None,
        "how to pool token vectors: mean, cls (the first), last; default: the model's, or mean, or last for a decoder",
        VALUES,
        choices=POOLINGS,
    )
    temperature: float = flag(0.05, "similarities are divided by this in the loss", VALUES, range=POSITIVE)
    matryoshka_dims: list[int] | None = flag(
        None, "shorter lengths at which the vectors should also work, such as 256 128 64", VALUES,
        range=AT_LEAST_ONE,
    )  # fmt: skip
    mined_negatives: int = flag(
        0, "hard negatives to find for each pair with the model before training", NEVER, range=NOT_NEGATIVE
    )


EMBEDDING = Recipe(
    name="embedding",
    task=Task("feature-extraction", "AutoModel", "FEATURE_EXTRACTION"),
    groups=(
        ModelArguments,
        AdapterArguments,
        EmbeddingDataArguments,
        PreparationArguments,
        EmbeddingArguments,
        *TRAINER_GROUPS,
    ),
    figures=("loss", "recall_at_1", "recall_at_5", "recall_at_10", "mrr_at_10", "triplet_accuracy", "spearman"),
    defaults={
        **USUAL,
        "output_dir": "runs/embedding",
        "per_device_train_batch_size": 32,
        "num_train_epochs": 1,
        "warmup_steps": 0.1,
        "remove_unused_columns": False,  # the collator builds the model's inputs from a row
    },
    scratch_defaults={
        "learning_rate": 1e-3,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 64,
        "max_seq_length": 64,
    },
)
