"""chrF of a whole set, as sacrebleu counts it: for languages whose words have many forms, or no blanks between them."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import CHRF


class Chrf(evaluate.Metric):
    """`chrf`, between 0 and 100, with sacrebleu's defaults: chrF2, up to six characters."""

    def _info(self) -> Any:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Runs of up to six characters in common, over all texts together.",
            citation="M. Popovic, chrF: character n-gram F-score for automatic MT evaluation, 2015",
            inputs_description="predictions, references: texts.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"chrf": float(CHRF().corpus_score(list(predictions), [list(references)]).score)}
