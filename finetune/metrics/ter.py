"""TER over a whole data set, as sacrebleu computes it: edits from a text to its reference, per reference word."""

from __future__ import annotations

from typing import Any

import evaluate
from sacrebleu.metrics import TER

from finetune.metrics import info


class Ter(evaluate.Metric):
    """`ter`, from 0; lower is better. 100 means one edit per reference word. M. Snover et al., A study of translation
    edit rate with targeted human annotation, 2006."""

    greater_is_better = False

    def _info(self) -> Any:
        return info(self, "string")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"ter": float(TER().corpus_score(list(predictions), [list(references)]).score)}
