"""Exact match and F1 of answers, as SQuAD's scripts compute them."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

import evaluate

from finetune.metrics import info

ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
PUNCTUATION = str.maketrans("", "", string.punctuation)


class Squad(evaluate.Metric):
    """`exact_match` and `f1`, between 0 and 1: the best over a question's true answers, ignoring case, punctuation,
    articles and repeated spaces. For a question without a true answer, only an empty answer is correct. Rajpurkar et
    al., Know what you don't know: unanswerable questions for SQuAD, arXiv 1806.03822."""

    def _info(self) -> Any:
        return info(self, "string", ["string"])

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        scores = [_best(guess, truth) for guess, truth in zip(predictions, references, strict=True)]
        exact, shared = zip(*scores, strict=True)
        return {"exact_match": sum(exact) / len(scores), "f1": sum(shared) / len(scores)}


def _best(guess: str, truth: list[str]) -> tuple[float, float]:
    said = normalized(guess)
    known = [words for one in truth if (words := normalized(one))] or [""]
    return max(float(said == one) for one in known), max(_f1(said.split(), one.split()) for one in known)


def normalized(text: str) -> str:
    """Lowercase, then remove punctuation, then articles, then extra spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _f1(guess: list[str], truth: list[str]) -> float:
    if not guess or not truth:
        return float(guess == truth)
    shared = sum((Counter(guess) & Counter(truth)).values())
    return 2 * shared / (len(guess) + len(truth))
