"""The share of correct rows. Under the configuration "multilabel", a row is correct if all of its labels are."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """`accuracy`, or `subset_accuracy` for rows with several labels."""

    def _info(self) -> Any:
        one = datasets.Value("int64")
        value = datasets.Sequence(one) if self.config_name == "multilabel" else one
        return evaluate.MetricInfo(
            description="The share of rows whose predicted label, or all of whose labels, are correct.",
            citation="",
            inputs_description="predictions, references: ids, or rows of 0 and 1. sample_weight: the weight of each.",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: Any, references: Any, sample_weight: Any = None) -> dict[str, float]:
        share = accuracy_score(np.asarray(references), np.asarray(predictions), sample_weight=sample_weight)
        return {"subset_accuracy" if self.config_name == "multilabel" else "accuracy": float(share)}
