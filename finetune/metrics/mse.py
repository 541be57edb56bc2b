"""The mean squared error of predicted numbers."""

from __future__ import annotations

import math
from typing import Any

import evaluate
import numpy as np
from sklearn.metrics import mean_squared_error

from finetune.metrics import info


class MSE(evaluate.Metric):
    """`mse`; lower is better."""

    greater_is_better = False

    def _info(self) -> Any:
        return info(self, "float64")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        # scikit-learn would raise here; the end of the run reports that it diverged.
        finite = np.isfinite(np.asarray(predictions)).all()
        return {"mse": float(mean_squared_error(references, predictions)) if finite else math.nan}
