"""Metrics against figures worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from finetune.training.metrics import classification_metrics, confusion, log_softmax, regression_metrics


def test_classification_metrics_are_right_on_four_rows() -> None:
    logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    found = classification_metrics(SimpleNamespace(predictions=logits, label_ids=np.array([0, 1, 1, 0])))
    rows = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(3)), math.log(2)]
    assert found["loss"] == pytest.approx(sum(rows) / 4)
    assert found["accuracy"] == 0.75
    # class 0: precision 2/3, recall 1; class 1: precision 1, recall 1/2
    assert found["f1_macro"] == pytest.approx((0.8 + 2 / 3) / 2)
    assert found["matthews"] == pytest.approx((2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 1 * 2))


def test_regression_metrics_are_right_and_a_constant_has_no_correlation() -> None:
    found = regression_metrics(
        SimpleNamespace(predictions=np.array([[1.0], [2.0], [4.0]]), label_ids=np.array([1, 2, 3]))
    )
    assert found["mse"] == found["loss"] == pytest.approx(1 / 3)
    assert found["pearson"] == pytest.approx(np.corrcoef([1, 2, 4], [1, 2, 3])[0, 1])
    flat = regression_metrics(SimpleNamespace(predictions=np.ones((3, 1)), label_ids=np.array([1, 2, 3])))
    assert flat["pearson"] == 0.0


def test_confusion_has_true_labels_in_rows_also_for_classes_that_never_occur() -> None:
    logits = np.array([[0, 1, 0], [0, 1, 0], [1, 0, 0]])
    assert confusion((logits, "hidden states"), [0, 1, 0], 3).tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_log_softmax_does_not_overflow() -> None:
    assert log_softmax(np.array([1000.0, 0.0])).tolist() == pytest.approx([0.0, -1000.0])
