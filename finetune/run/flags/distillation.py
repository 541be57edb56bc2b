"""Flags for distillation from a teacher, for the recipes that train classifiers and causal language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.run.flag import AT_LEAST_ONE, NAME_OR_PATH, POSITIVE, Range, flag
from finetune.run.on_resume import MODEL, VALUES


@dataclass
class DistillArguments:
    """Also learn from a trained model's probabilities (Hinton et al., arXiv 1503.02531)."""

    teacher: str | None = flag(
        None, "hub id or folder of a trained model with the same tokenizer, to learn from", MODEL, path=NAME_OR_PATH
    )
    distill_alpha: float = flag(
        0.5, "weight of the teacher's probabilities; 1: ignore the data's labels", VALUES, range=Range(0, most=1)
    )
    distill_temperature: float = flag(
        2.0, "temperature at which both models' probabilities are compared", VALUES, range=POSITIVE
    )


@dataclass
class CachedTeacherArguments:
    """Run the teacher before training, and train without it."""

    teacher_top_k: int | None = flag(
        None,
        "run the teacher once, before training, and keep its probabilities of this many tokens per position; default: "
        "run it in each step",
        VALUES,
        range=AT_LEAST_ONE,
    )


def of_teacher(value: Callable[[str], Any]) -> str:
    """A description of the teacher for the model card, from the values of the flags; "" without a teacher."""
    if not (value("teacher") and value("distill_alpha")):
        return ""
    alpha, temperature = value("distill_alpha"), value("distill_temperature")
    kept = value("teacher_top_k")
    of_these = f", using its {kept:,} largest probabilities per position" if kept else ""
    return f"distilled from {value('teacher')}, with alpha {alpha:g} at temperature {temperature:g}{of_these}"
