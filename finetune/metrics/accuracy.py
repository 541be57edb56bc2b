"""The share of correct rows. Under the configuration "multilabel", a row is correct if all of its labels are."""

from __future__ import annotations

from typing import Any

import evaluate
import numpy as np
from sklearn.metrics import accuracy_score

from finetune.metrics import info


class Accuracy(evaluate.Metric):
    """`accuracy`, or `subset_accuracy` for rows with several labels."""

    def _info(self) -> Any:
        return info(self, ["int64"] if self.config_name == "multilabel" else "int64")

    def _compute(self, predictions: Any, references: Any, sample_weight: Any = None) -> dict[str, float]:
        share = accuracy_score(np.asarray(references), np.asarray(predictions), sample_weight=sample_weight)
        return {"subset_accuracy" if self.config_name == "multilabel" else "accuracy": float(share)}
