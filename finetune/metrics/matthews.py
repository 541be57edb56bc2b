"""Matthews correlation coefficient; it is 0 for always guessing the largest class."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sklearn.metrics import matthews_corrcoef


class Matthews(evaluate.Metric):
    """`matthews`, between -1 and 1."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description="The correlation of predicted with true classes.",
            citation="B. W. Matthews, Comparison of the predicted and observed secondary structure, 1975",
            inputs_description="predictions, references: ids. sample_weight: the weight of each.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: Any, references: Any, sample_weight: Any = None) -> dict[str, float]:
        return {"matthews": float(matthews_corrcoef(references, predictions, sample_weight=sample_weight))}
