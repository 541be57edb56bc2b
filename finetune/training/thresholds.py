"""The probability from which each label is given, chosen per label on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from finetune.data.columns import MULTI_LABEL, Labels
from finetune.training.run_folder import add_to_config

UNSETTLED_THRESHOLD = 0.5  # until one is chosen, and for labels with too few held-out rows
FEWEST = 5  # held-out rows with a label; a threshold chosen on fewer would be noise


def thresholds_of(config: Any, labels: Labels) -> list[float] | None:
    """The thresholds in a trained model's config, 0.5 for any that is not a number; None if it has none for these
    labels."""
    found = getattr(config, "thresholds", None)
    if labels.task != MULTI_LABEL or not isinstance(found, list) or len(found) != len(labels.names):
        return None
    return [float(value) if isinstance(value, int | float) else UNSETTLED_THRESHOLD for value in found]


def choose_thresholds(logits: npt.NDArray[Any], truth: npt.NDArray[Any]) -> list[float]:
    """For each label (arrays are (N, labels)), the probability with the highest F1, halfway between two rows."""
    scores = expit(np.asarray(logits, dtype=np.float64))
    return [_best_threshold(*column) for column in zip(scores.T, np.asarray(truth).T > 0, strict=True)]


def _best_threshold(scores: npt.NDArray[Any], is_true: npt.NDArray[np.bool_]) -> float:
    if is_true.sum() < FEWEST or is_true.all() or not np.isfinite(scores).all():  # not finite: the model has diverged
        return UNSETTLED_THRESHOLD
    order = np.argsort(-scores, kind="stable")
    ordered: npt.NDArray[Any] = np.append(scores[order], 0.0)
    given = np.arange(1, len(scores) + 1)  # the label goes to this many rows, the likeliest ones
    f1 = 2 * np.cumsum(is_true[order]) / (given + is_true.sum())
    f1[ordered[:-1] == ordered[1:]] = -1  # no threshold separates rows with equal scores
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    cuts = (ordered[best] + ordered[best + 1]) / 2
    return float(cuts[np.argmin(np.abs(cuts - UNSETTLED_THRESHOLD))])


def save_thresholds(folder: Path, thresholds: Sequence[float]) -> None:
    """Write thresholds, in the order of the labels, into the saved config. Only rank 0."""
    add_to_config(folder, "thresholds", list(thresholds))


def label_table(
    logits: npt.NDArray[Any], truth: npt.NDArray[Any], labels: Labels, thresholds: Sequence[float] | None
) -> list[dict[str, Any]]:
    """For each label: precision, recall, F1, the number of rows that have it, and its threshold."""
    from sklearn.metrics import precision_recall_fscore_support

    given = given_labels(logits, thresholds)
    figures = precision_recall_fscore_support(np.asarray(truth) > 0, given > 0, average=None, zero_division=0)
    least = [UNSETTLED_THRESHOLD] * len(labels.names) if thresholds is None else thresholds
    rows = named_figures(labels.names, *figures)
    return [{**row, "threshold": threshold} for row, threshold in zip(rows, least, strict=True)]


def named_figures(names: Sequence[str], *figures: Any) -> list[dict[str, Any]]:
    """A row for each name, from arrays of precision, recall, F1 and support."""
    return [
        {"label": name, "precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
        for name, p, r, f, n in zip(names, *figures, strict=True)
    ]


def given_labels(logits: npt.NDArray[Any], thresholds: Sequence[float] | None = None) -> npt.NDArray[Any]:
    """Rows of 0 and 1 (N, labels): which labels are given at these thresholds."""
    least = UNSETTLED_THRESHOLD if thresholds is None else np.asarray(thresholds)
    given: npt.NDArray[Any] = (expit(np.asarray(logits, dtype=np.float64)) >= least).astype(np.int64)
    return given
