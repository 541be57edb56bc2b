"""The mean squared error of predicted numbers."""

from __future__ import annotations

import math
from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import mean_squared_error


class MSE(evaluate.Metric):
    """`mse`; lower is better."""

    greater_is_better = False

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description="The mean of the squared differences.",
            citation="",
            inputs_description="predictions, references: numbers.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        # scikit-learn would raise here; the end of the run reports that it diverged.
        finite = np.isfinite(np.asarray(predictions)).all()
        return {"mse": float(mean_squared_error(references, predictions)) if finite else math.nan}
