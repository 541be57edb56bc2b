"""From which probability a label is given, chosen label by label on rows that were held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from finetune.data.columns import MULTI_LABEL, Labels
from finetune.run.files import LABELS
from finetune.safe_read import read_json_object
from finetune.training.run_folder import write_json

UNSETTLED_THRESHOLD = 0.5  # until one is chosen, and for labels that are held out too seldom
FEWEST = 5  # held-out rows with a label; a threshold chosen on fewer would be chance


def thresholds_of(config: Any, labels: Labels) -> list[float] | None:
    """Those that a trained model carries in its config, one half for any that is no number; None where it has none for
    these labels."""
    found = getattr(config, "thresholds", None)
    if labels.task != MULTI_LABEL or not isinstance(found, list) or len(found) != len(labels.names):
        return None
    return [float(value) if isinstance(value, int | float) else UNSETTLED_THRESHOLD for value in found]


def choose_thresholds(logits: npt.NDArray[Any], truth: npt.NDArray[Any]) -> list[float]:
    """The probability for each label (of N rows, labels) that gives it the highest F1, halfway between two rows."""
    scores = expit(np.asarray(logits, dtype=np.float64))
    return [_best_threshold(*column) for column in zip(scores.T, np.asarray(truth).T > 0, strict=True)]


def _best_threshold(scores: npt.NDArray[Any], is_true: npt.NDArray[np.bool_]) -> float:
    if is_true.sum() < FEWEST or is_true.all() or not np.isfinite(scores).all():  # as of a model that has diverged
        return UNSETTLED_THRESHOLD
    order = np.argsort(-scores, kind="stable")
    ordered: npt.NDArray[Any] = np.append(scores[order], 0.0)
    given = np.arange(1, len(scores) + 1)  # the label goes to so many rows, the likeliest ones
    f1 = 2 * np.cumsum(is_true[order]) / (given + is_true.sum())
    f1[ordered[:-1] == ordered[1:]] = -1  # rows of one score cannot be told apart
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    cuts = (ordered[best] + ordered[best + 1]) / 2
    return float(cuts[np.argmin(np.abs(cuts - UNSETTLED_THRESHOLD))])


def save_thresholds(folder: Path, thresholds: Sequence[float]) -> None:
    """Into the config.json that the run has saved, or the labels.json of an adapter, in the order of its labels. Only
    rank 0."""
    for saved in (folder / "config.json", folder / LABELS):
        if saved.is_file():
            write_json(saved, {**read_json_object(saved), "thresholds": list(thresholds)})


def label_table(
    logits: npt.NDArray[Any], truth: npt.NDArray[Any], labels: Labels, thresholds: Sequence[float] | None
) -> list[dict[str, Any]]:
    """For each label precision, recall, F1, the number of rows that have it, and its threshold."""
    from sklearn.metrics import precision_recall_fscore_support

    given = given_labels(logits, thresholds)
    figures = precision_recall_fscore_support(np.asarray(truth) > 0, given > 0, average=None, zero_division=0)
    least = [UNSETTLED_THRESHOLD] * len(labels.names) if thresholds is None else thresholds
    rows = named_figures(labels.names, *figures)
    return [{**row, "threshold": threshold} for row, threshold in zip(rows, least, strict=True)]


def named_figures(names: Sequence[str], *figures: Any) -> list[dict[str, Any]]:
    """Of each name its precision, recall, F1 and support, of which there is an array each."""
    return [
        {"label": name, "precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
        for name, p, r, f, n in zip(names, *figures, strict=True)
    ]


def given_labels(logits: npt.NDArray[Any], thresholds: Sequence[float] | None = None) -> npt.NDArray[Any]:
    """Rows of 0 and 1 (N, labels): which labels are given at those probabilities."""
    least = UNSETTLED_THRESHOLD if thresholds is None else np.asarray(thresholds)
    given: npt.NDArray[Any] = (expit(np.asarray(logits, dtype=np.float64)) >= least).astype(np.int64)
    return given
