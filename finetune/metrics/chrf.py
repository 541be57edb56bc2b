"""chrF over a whole data set, as sacrebleu computes it: for languages with rich morphology or without word spaces."""

from __future__ import annotations

from typing import Any

import evaluate
from sacrebleu.metrics import CHRF

from finetune.metrics import info


class Chrf(evaluate.Metric):
    """`chrf`, from 0 to 100, with sacrebleu's defaults: chrF2, n-grams of up to six characters. M. Popovic, chrF:
    character n-gram F-score for automatic MT evaluation, 2015."""

    def _info(self) -> Any:
        return info(self, "string")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"chrf": float(CHRF().corpus_score(list(predictions), [list(references)]).score)}
