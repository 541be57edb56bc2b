"""Matthews correlation coefficient; it is 0 for always guessing the largest class."""

from __future__ import annotations

from typing import Any

import evaluate
from sklearn.metrics import matthews_corrcoef

from finetune.metrics import info


class Matthews(evaluate.Metric):
    """`matthews`, between -1 and 1. B. W. Matthews, Comparison of the predicted and observed secondary structure,
    1975."""

    def _info(self) -> Any:
        return info(self, "int64")

    def _compute(self, predictions: Any, references: Any, sample_weight: Any = None) -> dict[str, float]:
        return {"matthews": float(matthews_corrcoef(references, predictions, sample_weight=sample_weight))}
