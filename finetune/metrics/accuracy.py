"""The share of right answers. Under the configuration "multilabel" a row is right where all of its labels are."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """`accuracy`, or `subset_accuracy` of rows with several labels."""

    def _info(self) -> Any:
        one = datasets.Value("int64")
        value = datasets.Sequence(one) if self.config_name == "multilabel" else one
        return evaluate.MetricInfo(
            description="The share of rows whose predicted label, or labels, are the true ones.",
            citation="",
            inputs_description="predictions, references: ids, or rows of 0 and 1. sample_weight: how often each.",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: Any, references: Any, sample_weight: Any = None) -> dict[str, float]:
        share = accuracy_score(np.asarray(references), np.asarray(predictions), sample_weight=sample_weight)
        return {"subset_accuracy" if self.config_name == "multilabel" else "accuracy": float(share)}
