"""Metrics against figures worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import TrainingArguments

from finetune.errors import RequestError
from finetune.run.flags.language import CorpusArguments
from finetune.training.metrics import (
    CountedMetrics,
    classification_metrics,
    confusion,
    language_metrics,
    log_softmax,
    regression_metrics,
    settle_language_arguments,
)


def test_a_language_models_figures_are_over_all_tokens() -> None:
    rows = np.array([[2 * math.log(2), 1, 2], [6 * math.log(2), 0, 2]])  # nats, right guesses, tokens
    found = language_metrics(tokens_per_byte=0.5, tokens_per_character=1.0)(SimpleNamespace(predictions=rows))
    assert found == pytest.approx(
        {
            "loss": 2 * math.log(2),
            "perplexity": 4.0,
            "bits_per_byte": 1.0,
            "bits_per_character": 2.0,
            "token_accuracy": 0.25,
        }
    )


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("perplexity", False), ("eval_bits_per_byte", False), ("loss", False), ("token_accuracy", True)],
)
def test_the_best_language_model_has_the_least_of_all_but_accuracy(metric: str, greater: bool, tmp_path: Path) -> None:
    training = TrainingArguments(output_dir=str(tmp_path), do_train=True, metric_for_best_model=metric, use_cpu=True)
    settle_language_arguments(training, CorpusArguments(), {})
    assert training.greater_is_better is greater
    settle_language_arguments(training, CorpusArguments(), {"greater_is_better": True})
    assert training.greater_is_better is greater, "what is given stays"


def test_a_stream_is_saved_and_evaluated_by_steps(tmp_path: Path) -> None:
    strategies = {"do_train": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    training = TrainingArguments(output_dir=str(tmp_path), max_steps=9, save_steps=3, use_cpu=True, **strategies)
    streaming = CorpusArguments(streaming=True)
    with pytest.raises(RequestError, match="--save_strategy epoch: nobody knows how long a stream is"):
        settle_language_arguments(training, streaming, {"save_strategy": "epoch"})
    settle_language_arguments(training, streaming, {})
    assert (training.save_strategy, training.eval_strategy, training.eval_steps) == ("steps", "steps", 3)


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


def test_a_pipelines_sums_give_the_figures_of_the_rows() -> None:
    """One class of the four is never seen, and one is seen but never guessed."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(50, 4)) - [0, 0, 50, 50]
    ids = random.choice([0, 1, 2], size=50)
    whole = classification_metrics(SimpleNamespace(predictions=logits, label_ids=ids))
    counts = confusion(logits, ids, 4)
    sums = np.concatenate([[whole["loss"] * 50], counts.ravel()])[None]  # (1, 1 + classes^2)
    of_sums, of_rows = CountedMetrics(4), CountedMetrics(4)
    assert of_sums(SimpleNamespace(predictions=sums, label_ids=None)) == pytest.approx(whole)
    assert of_rows(SimpleNamespace(predictions=logits, label_ids=ids)) == pytest.approx(whole)
    assert np.array_equal(of_sums.counts, counts)
    assert np.array_equal(of_rows.counts, counts)
