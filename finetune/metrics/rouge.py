"""ROUGE: the overlap of words, word pairs and longest common subsequences with the reference text."""

from __future__ import annotations

from typing import Any

import evaluate
from rouge_score.rouge_scorer import RougeScorer

from finetune.metrics import info

FIGURES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Rouge(evaluate.Metric):
    """`rouge1`, `rouge2`, `rougeL` and `rougeLsum`, between 0 and 1: mean F1 over stemmed words of Latin letters and
    digits. For `rougeLsum`, each line counts as a sentence. C.-Y. Lin, ROUGE: a package for automatic evaluation of
    summaries, 2004."""

    def _info(self) -> Any:
        return info(self, "string")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        scorer = RougeScorer(FIGURES, use_stemmer=True)
        scores = [scorer.score(truth, guess) for guess, truth in zip(predictions, references, strict=True)]
        return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in FIGURES}
