"""chrF over a whole data set, as sacrebleu computes it: for languages with rich morphology or without word spaces."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import CHRF


class Chrf(evaluate.Metric):
    """`chrf`, from 0 to 100, with sacrebleu's defaults: chrF2, n-grams of up to six characters."""

    def _info(self) -> Any:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Shared n-grams of up to six characters, over all texts together.",
            citation="M. Popovic, chrF: character n-gram F-score for automatic MT evaluation, 2015",
            inputs_description="predictions, references: texts.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"chrf": float(CHRF().corpus_score(list(predictions), [list(references)]).score)}
