"""A second model that the first one learns from: flags of the recipes of classifiers and of causal language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.run.flag import NAME_OR_PATH, flag
from finetune.run.on_resume import MODEL, VALUES
from finetune.run.range import AT_LEAST_ONE, POSITIVE, Range


@dataclass
class DistillArguments:
    """Learn from a trained model's probabilities, too (Hinton et al., arXiv 1503.02531)."""

    teacher: str | None = flag(
        None, "hub id or folder of a trained model with the same tokenizer, to learn from", MODEL, path=NAME_OR_PATH
    )
    distill_alpha: float = flag(
        0.5, "weight of what the teacher says; 1: the data's own labels do not count", VALUES, range=Range(0, most=1)
    )
    distill_temperature: float = flag(
        2.0, "temperature of both models' probabilities while they are compared", VALUES, range=POSITIVE
    )


@dataclass
class CachedTeacherArguments:
    """Ask the teacher before training, and train without it."""

    teacher_top_k: int | None = flag(
        None,
        "ask the teacher once, before training, and keep the probabilities of so many tokens a position; default: ask "
        "it at each step",
        VALUES,
        range=AT_LEAST_ONE,
    )


def of_teacher(value: Callable[[str], Any]) -> str:
    """Which one, for the model card, by the values of flags; "" without."""
    if not (value("teacher") and value("distill_alpha")):
        return ""
    alpha, temperature = value("distill_alpha"), value("distill_temperature")
    kept = value("teacher_top_k")
    of_these = f", of whose probabilities the {kept:,} greatest a position count one by one" if kept else ""
    return f"learnt from the teacher {value('teacher')}, with alpha {alpha:g} at temperature {temperature:g}{of_these}"
