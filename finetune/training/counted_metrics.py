"""Metrics from a confusion matrix, which is all that a pipeline's evaluation gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.columns import Labels
from finetune.errors import RequestError, first_line
from finetune.training.metric_modules import Metric
from finetune.training.metrics import LOSS, MOST_SAMPLED, TaskMetrics, confusion


class CountedMetrics:
    """The figures of a classification, and in `counts` the confusion matrix of the last evaluation (classes,
    classes). It takes logits and ids, or with `of_sums` those of a pipeline's evaluation (1, 1 + classes^2): the loss
    over all rows, and a confusion matrix row by row. Raises RequestError for a metric that cannot take what there is.
    """

    def __init__(self, classes: int, names: Sequence[str] | None = None, of_sums: bool = False) -> None:
        self.counts: npt.NDArray[Any] = np.zeros((classes, classes), dtype=np.int64)
        self.of_rows = TaskMetrics(Labels("classification", tuple(map(str, range(classes)))), names)
        self.labels, self.greater_is_better = self.of_rows.labels, self.of_rows.greater_is_better
        for metric in self.of_rows.metrics if of_sums else ():
            _try_on_counts(metric, min(classes, MOST_SAMPLED))

    def __call__(self, evaluated: Any) -> dict[str, float]:
        if evaluated.label_ids is not None:
            self.counts = confusion(evaluated.predictions, evaluated.label_ids, len(self.counts))
            return self.of_rows(evaluated)
        loss, *cells = np.asarray(evaluated.predictions, dtype=np.float64)[0]
        self.counts = np.rint(cells).astype(np.int64).reshape(self.counts.shape)
        return {LOSS: float(loss / self.counts.sum()), **self.of_rows.figures(_pairs(self.counts))}


def _pairs(counts: npt.NDArray[Any]) -> dict[str, Any]:
    """What metrics take of a confusion matrix: each pair of classes that was seen, weighed by how often."""
    truth, predicted = np.nonzero(counts)
    return {"predictions": predicted, "references": truth, "sample_weight": counts[truth, predicted]}


def _try_on_counts(metric: Metric, classes: int) -> None:
    """Raises RequestError where a metric fails on pairs of classes, or says other things of them than of the rows."""
    counts = np.diag(np.arange(1, classes + 1))
    counts[0, -1] += 2  # of the first class, taken for the last
    pairs = _pairs(counts)
    rows: dict[str, Any] = {
        name: np.repeat(pairs[name], pairs["sample_weight"]) for name in ("predictions", "references")
    }
    try:
        weighed, by_row = metric.compute(pairs), metric.compute(rows)
    except Exception as error:  # whatever a stranger's metric raises
        why = f"fails on that: {type(error).__name__}: {first_line(error, 300)}"
    else:
        wrong = [name for name in by_row if not np.isclose(weighed.get(name, math.nan), by_row[name], equal_nan=True)]
        if not wrong:
            return
        why = f"then gives another {wrong[0]} than of the rows one by one"
    raise RequestError(
        f"--metrics {metric.name}: a pipeline's evaluation has no scores of the rows, and each pair of classes once, "
        f"with how often as sample_weight. The metric {why}. Take sample_weight in its _compute, or drop "
        "--pipeline_parallel_size."
    )
