"""BLEU over a whole data set, as sacrebleu computes it."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU


class Bleu(evaluate.Metric):
    """`bleu`, from 0 to 100, with sacrebleu's defaults: 13a tokenization, n-grams up to 4, exponential smoothing."""

    def _info(self) -> Any:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Shared n-grams of up to four words, over all texts together.",
            citation="M. Post, A call for clarity in reporting BLEU scores, 2018",
            inputs_description="predictions, references: texts.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"bleu": float(BLEU().corpus_score(list(predictions), [list(references)]).score)}
