"""TER over a whole data set, as sacrebleu computes it: edits from a text to its reference, per reference word."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import TER


class Ter(evaluate.Metric):
    """`ter`, from 0; lower is better. 100 means one edit per reference word."""

    greater_is_better = False

    def _info(self) -> Any:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Insertions, deletions, substitutions and shifts, per reference word.",
            citation="M. Snover et al., A study of translation edit rate with targeted human annotation, 2006",
            inputs_description="predictions, references: texts.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"ter": float(TER().corpus_score(list(predictions), [list(references)]).score)}
