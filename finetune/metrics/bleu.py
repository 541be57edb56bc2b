"""BLEU over a whole data set, as sacrebleu computes it."""

from __future__ import annotations

from typing import Any

import evaluate
from sacrebleu.metrics import BLEU

from finetune.metrics import info


class Bleu(evaluate.Metric):
    """`bleu`, from 0 to 100, with sacrebleu's defaults: 13a tokenization, n-grams up to 4, exponential smoothing. M.
    Post, A call for clarity in reporting BLEU scores, 2018."""

    def _info(self) -> Any:
        return info(self, "string")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"bleu": float(BLEU().corpus_score(list(predictions), [list(references)]).score)}
