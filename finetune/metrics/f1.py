"""Macro F1, the mean over classes; under the configuration "multilabel" also micro F1, over all labels of all rows."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import f1_score


class F1(evaluate.Metric):
    """`f1_macro`; for rows with several labels also `f1_micro`, which for single labels equals the accuracy."""

    def _info(self) -> Any:
        one = datasets.Value("int64")
        value = datasets.Sequence(one) if self.config_name == "multilabel" else one
        return evaluate.MetricInfo(
            description="The harmonic mean of precision and recall.",
            citation="",
            inputs_description="predictions, references: ids, or rows of 0 and 1. sample_weight: the weight of each.",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: Any, references: Any, sample_weight: Any = None) -> dict[str, float]:
        averages = ("micro", "macro") if self.config_name == "multilabel" else ("macro",)
        rows = np.asarray(references), np.asarray(predictions)
        return {
            f"f1_{name}": float(f1_score(*rows, average=name, sample_weight=sample_weight, zero_division=0))
            for name in averages
        }
