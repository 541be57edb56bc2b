"""Pearson correlation of predicted with true numbers."""

from __future__ import annotations

from typing import Any

import evaluate
import numpy as np

from finetune.metrics import info


class Pearson(evaluate.Metric):
    """`pearson`, between -1 and 1; 0 if either side is constant or a prediction is not finite."""

    def _info(self) -> Any:
        return info(self, "float64")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        predicted, truth = np.asarray(predictions), np.asarray(references)
        if not np.isfinite(predicted).all() or predicted.std() == 0 or truth.std() == 0:
            return {"pearson": 0.0}
        return {"pearson": float(np.corrcoef(truth, predicted)[0, 1])}
