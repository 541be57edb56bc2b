"""recipes/question_answering.py: extractive question answering; and its flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.run.decoders import refuse_writer
from finetune.run.flag import AT_LEAST_ONE, METRIC, Range, Void, flag
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ModelArguments, PreparationArguments, SequenceArguments
from finetune.run.on_resume import EVALUATED, GOES_ON, ROWS
from finetune.run.recipe import USUAL, Recipe
from finetune.run.recipes import TRAINER_GROUPS
from finetune.run.sizes import DISTILBERT_SIZES, distilbert_shape
from finetune.run.task import Task

MOST_DIFFERENCE = 1e4  # between two scores: far more than any model's


@dataclass
class QuestionDataArguments(SequenceArguments):
    """What to train on. Without these, questions about functions of Python's standard library are used."""

    column_mapping: list[str] | None = flag(
        None, "names of columns in your files, e.g. title=question body=context", ROWS, pairs=True
    )
    doc_stride: int | None = flag(
        None,
        "tokens that two windows of a long context share; default: a third of --max_seq_length, at most 128",
        ROWS,
        range=AT_LEAST_ONE,
    )
    version_2_with_negative: bool = flag(False, "some questions have no answer in their context, as in SQuAD 2", ROWS)


@dataclass
class AnswerArguments:
    """Which answers are chosen, and how they are scored."""

    max_answer_length: int = flag(30, "longest answer, in tokens", EVALUATED, range=AT_LEAST_ONE)
    n_best_size: int = flag(
        20, "first tokens, last tokens and answers considered for each question", EVALUATED, range=AT_LEAST_ONE
    )
    null_score_diff_threshold: float | None = flag(
        None,
        "give no answer if that scores higher than the best by more than this; default: chosen on held-out ones",
        EVALUATED,
        range=Range(above=-MOST_DIFFERENCE, below=MOST_DIFFERENCE),
    )
    metrics: list[str] | None = flag(
        None,
        "names in finetune/metrics/, or files with an evaluate.Metric of texts and lists of texts; default: squad",
        GOES_ON,
        path=METRIC,
    )


def span_shape(read: Callable[[str], Any]) -> dict[str, Any]:
    """The config of the DistilBERT from scratch that the flags ask for, with the largest vocabulary that it may have.
    `read` returns the values of the flags."""
    size, dropout = read("model_size"), read("dropout")
    return {
        "model_type": "distilbert",
        "vocab_size": DISTILBERT_SIZES[size].vocab_size,
        **distilbert_shape(size, dropout, read("max_seq_length")),
        "qa_dropout": 0.1 if dropout is None else dropout,  # before the output layer
    }


QUESTION_ANSWERING = Recipe(
    name="question_answering",
    task=Task("question-answering", "AutoModelForQuestionAnswering", "QUESTION_ANS", refuse_writer),
    groups=(
        ModelArguments,
        AdapterArguments,
        QuestionDataArguments,
        PreparationArguments,
        AnswerArguments,
        *TRAINER_GROUPS,
    ),
    defaults={
        **USUAL,
        "output_dir": "runs/question_answering",
        "label_names": ["labels"],  # not the model's start_positions and end_positions: the loss is ours
        "remove_unused_columns": False,  # the collator builds the model's inputs from a row
    },
    figures=("loss", "exact_match", "f1"),
    metrics=("squad",),
    # A model from scratch has to learn to find words of the question in the context, which takes many steps.
    scratch_defaults={
        "learning_rate": 1e-3,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 32,
        "warmup_steps": 0.1,
        "max_seq_length": 128,
        "ddp_find_unused_parameters": False,
    },
    scratch=span_shape,
    void=(
        Void(
            ("null_score_diff_threshold",),
            "version_2_with_negative",
            (False,),
            "Every question has an answer then. Add --version_2_with_negative True.",
        ),
    ),
)
