"""Thresholds of labels, chosen on held-out rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import f1_score
from transformers.trainer_utils import PredictionOutput

from finetune.data.columns import MULTI_LABEL, Labels
from finetune.training.metrics import metrics_for, settle_thresholds
from finetune.training.thresholds import choose_thresholds, given_labels, thresholds_of

LABELS = Labels(MULTI_LABEL, ("often", "seldom"))


def test_no_other_threshold_gives_a_label_a_higher_f1() -> None:
    random = np.random.default_rng(3)
    truth = (random.random((300, 4)) < [0.5, 0.1, 0.05, 0.3]).astype(int)
    logits = np.round(random.normal(size=truth.shape) + 1.5 * truth - 2, 1)  # rounded: many rows of one score
    chosen = choose_thresholds(logits, truth)
    given = given_labels(logits, chosen)
    for label in range(4):
        best = max(
            f1_score(truth[:, label], expit(logits)[:, label] >= cut, zero_division=0)
            for cut in np.unique(expit(logits)[:, label])
        )
        assert f1_score(truth[:, label], given[:, label]) == pytest.approx(best)


def test_a_label_held_out_too_seldom_keeps_one_half() -> None:
    truth = np.zeros((50, 2))
    truth[:20, 0], truth[:3, 1] = 1, 1
    assert choose_thresholds(4 * truth - 6, truth) == [pytest.approx(expit(np.array([-2.0, -6])).mean()), 0.5]


def test_thresholds_go_into_the_config_and_come_back_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "distilbert"}')
    truth = np.array([[1, 0]] * 10 + [[0, 1]] * 10)
    metrics = metrics_for(LABELS)
    speaks, trains = SimpleNamespace(speaks=True), SimpleNamespace(do_train=True)
    session = SimpleNamespace(launch=speaks, training=trains, folder=tmp_path)
    evaluated = PredictionOutput(4.0 * truth - 5, truth, {"eval_f1_micro": 0.0, "eval_runtime": 1.0})
    found = settle_thresholds(session, metrics, evaluated)
    assert (found.metrics["eval_f1_micro"], found.metrics["eval_runtime"]) == (1.0, 1.0), "0.5 would give no label"
    assert metrics.thresholds == pytest.approx([expit(np.array([-1.0, -5])).mean()] * 2, abs=1e-6)
    config = SimpleNamespace(**json.loads((tmp_path / "config.json").read_text()))
    assert config.model_type == "distilbert"
    assert metrics_for(LABELS, None, config).thresholds == metrics.thresholds
    assert thresholds_of(config, Labels("classification", ("a", "b"))) is None


def test_a_model_that_has_diverged_keeps_one_half_and_so_does_what_was_saved_as_null() -> None:
    truth = np.array([[1, 0]] * 10 + [[0, 1]] * 10)
    logits = np.where(np.arange(20)[:, None] == 3, np.nan, 4.0 * truth - 5)
    assert choose_thresholds(logits, truth) == [0.5, 0.5]
    assert thresholds_of(SimpleNamespace(thresholds=[None, 0.25]), LABELS) == [0.5, 0.25]
