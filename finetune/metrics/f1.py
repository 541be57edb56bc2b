"""Macro F1, the mean over classes; under the configuration "multilabel" also micro F1, over all labels of all rows."""

from __future__ import annotations

from typing import Any

import evaluate
import numpy as np
from sklearn.metrics import f1_score

from finetune.metrics import info


class F1(evaluate.Metric):
    """`f1_macro`; for rows with several labels also `f1_micro`, which for single labels equals the accuracy."""

    def _info(self) -> Any:
        return info(self, ["int64"] if self.config_name == "multilabel" else "int64")

    def _compute(self, predictions: Any, references: Any, sample_weight: Any = None) -> dict[str, float]:
        averages = ("micro", "macro") if self.config_name == "multilabel" else ("macro",)
        rows = np.asarray(references), np.asarray(predictions)
        return {
            f"f1_{name}": float(f1_score(*rows, average=name, sample_weight=sample_weight, zero_division=0))
            for name in averages
        }
