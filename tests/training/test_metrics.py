"""Metrics against figures worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import log_softmax
from transformers import TrainingArguments

from finetune.data.columns import MULTI_LABEL, TOKENS, Labels
from finetune.errors import RequestError
from finetune.run.conflicts import METRICS_OF_TASK
from finetune.run.launch import Launch
from finetune.run.paths import METRICS
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.recipes.causal_lm_pipeline import CAUSAL_LM_PIPELINE
from finetune.run.recipes.image_cls import IMAGE_CLS
from finetune.run.recipes.seq_cls import SEQ_CLS
from finetune.run.recipes.token_cls import TOKEN_CLS
from finetune.run.resolve import resolve
from finetune.training.metrics import (
    CountedMetrics,
    TaskMetrics,
    confusion,
    language_metrics,
    metrics_for,
    settle_best_metric,
)
from finetune.training.start import settled_values, training_arguments
from finetune.training.thresholds import given_labels

CLASSES = Labels("classification", ("bad", "good"))
NUMBERS = Labels("regression", ())
TOPICS = Labels(MULTI_LABEL, ("art", "law", "war"))


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
    ("labels", "known"),
    [
        (CLASSES, SEQ_CLS.metrics),
        (TOPICS, METRICS_OF_TASK[MULTI_LABEL]),
        (NUMBERS, METRICS_OF_TASK["regression"]),
        (Labels(TOKENS, ("O", "B-x", "I-x")), TOKEN_CLS.metrics),
    ],
)
def test_it_is_known_without_trying_which_metrics_are_for_a_task(labels: Labels, known: tuple[str, ...]) -> None:
    def fits(name: str) -> bool:
        try:
            return bool(TaskMetrics(labels, [name]).metrics)
        except RequestError:
            return False

    assert sorted(known) == [name for name in METRICS if fits(name)]
    assert IMAGE_CLS.metrics == SEQ_CLS.metrics


def test_recipes_know_the_figures_of_their_evaluations() -> None:
    tokens = Labels(TOKENS, ("O", "B-x", "I-x"))
    rows = np.array([[1.0, 1.0, 2.0]])
    given = (
        (SEQ_CLS, [metrics_for(labels).greater_is_better for labels in (CLASSES, NUMBERS, TOPICS)]),
        (TOKEN_CLS, [metrics_for(tokens).greater_is_better]),
        (IMAGE_CLS, [CountedMetrics(2).greater_is_better]),
        (CAUSAL_LM_PIPELINE, [language_metrics(1.0, 1.0)(SimpleNamespace(predictions=rows))]),
    )
    for recipe, evaluations in given:
        assert set(recipe.figures) == {figure for figures in evaluations for figure in figures}


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("perplexity", False), ("eval_bits_per_byte", False), ("loss", False), ("token_accuracy", True)],
)
def test_the_best_language_model_has_the_least_of_all_but_accuracy(metric: str, greater: bool) -> None:
    flags = ["--train_file", "a.txt", "--metric_for_best_model", metric]
    assert _training(*flags).greater_is_better is greater
    assert _training(*flags, "--greater_is_better", str(not greater)).greater_is_better is not greater, "what is given"


def test_a_stream_is_saved_and_evaluated_by_steps() -> None:
    flags = ["--train_file", "a.txt", "--tokenizer", "byte", "--streaming", "True", "--max_steps", "9"]
    training = _training(*flags, "--save_steps", "3")
    assert (training.save_strategy, training.eval_strategy, training.eval_steps) == ("steps", "steps", 3)


def _training(*flags: str) -> TrainingArguments:
    run = resolve(CAUSAL_LM, [*flags, "--use_cpu", "True"], Launch(), is_here=False)
    return training_arguments(run, **settled_values(run, has_cuda=False, by_hand=False))


def test_classification_metrics_are_right_on_four_rows() -> None:
    logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    found = metrics_for(CLASSES)(SimpleNamespace(predictions=logits, label_ids=np.array([0, 1, 1, 0])))
    rows = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(3)), math.log(2)]
    assert found["loss"] == pytest.approx(sum(rows) / 4)
    assert found["accuracy"] == 0.75
    # class 0: precision 2/3, recall 1; class 1: precision 1, recall 1/2
    assert found["f1_macro"] == pytest.approx((0.8 + 2 / 3) / 2)
    assert found["matthews"] == pytest.approx((2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 1 * 2))


def test_regression_metrics_are_right_and_a_constant_has_no_correlation() -> None:
    found = metrics_for(NUMBERS)(
        SimpleNamespace(predictions=np.array([[1.0], [2.0], [4.0]]), label_ids=np.array([1, 2, 3]))
    )
    assert found["mse"] == found["loss"] == pytest.approx(1 / 3)
    assert found["pearson"] == pytest.approx(np.corrcoef([1, 2, 4], [1, 2, 3])[0, 1])
    flat = metrics_for(NUMBERS)(SimpleNamespace(predictions=np.ones((3, 1)), label_ids=np.array([1, 2, 3])))
    assert flat["pearson"] == 0.0


def test_confusion_has_true_labels_in_rows_also_for_classes_that_never_occur() -> None:
    logits = np.array([[0, 1, 0], [0, 1, 0], [1, 0, 0]])
    assert confusion((logits, "hidden states"), [0, 1, 0], 3).tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_a_pipelines_sums_give_the_figures_of_the_rows() -> None:
    """One class of the four is never seen, and one is seen but never guessed."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(50, 4)) - [0, 0, 50, 50]
    ids = random.choice([0, 1, 2], size=50)
    whole = metrics_for(Labels("classification", tuple("abcd")))(SimpleNamespace(predictions=logits, label_ids=ids))
    counts = confusion(logits, ids, 4)
    sums = np.concatenate([[whole["loss"] * 50], counts.ravel()])[None]  # (1, 1 + classes^2)
    of_sums, of_rows = CountedMetrics(4), CountedMetrics(4)
    assert of_sums(SimpleNamespace(predictions=sums, label_ids=None)) == pytest.approx(whole)
    assert of_rows(SimpleNamespace(predictions=logits, label_ids=ids)) == pytest.approx(whole)
    assert np.array_equal(of_sums.counts, counts)
    assert np.array_equal(of_rows.counts, counts)


def test_the_figures_are_those_of_scikit_learn_on_the_same_rows() -> None:
    """What the metrics gave before they went through `evaluate`, by the same calls; of diverged numbers as well."""
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    random = np.random.default_rng(1)
    logits, ids = random.normal(size=(200, 5)), random.integers(0, 4, 200)  # the last class never occurs
    found = metrics_for(Labels("classification", tuple("abcde")))(SimpleNamespace(predictions=logits, label_ids=ids))
    guess = logits.argmax(axis=-1)
    loss = -log_softmax(logits, axis=-1)[np.arange(200), ids].mean()
    f1 = f1_score(ids, guess, average="macro", zero_division=0)
    assert list(found.items()) == [
        ("loss", loss),
        ("accuracy", accuracy_score(ids, guess)),
        ("f1_macro", f1),
        ("matthews", matthews_corrcoef(ids, guess)),
    ]
    diverged = metrics_for(NUMBERS)(SimpleNamespace(predictions=np.array([[np.nan], [1.0]]), label_ids=np.ones(2)))
    assert math.isnan(diverged["loss"])
    assert math.isnan(diverged["mse"])
    assert diverged["pearson"] == 0.0


def test_several_labels_a_row_are_measured_label_by_label_and_row_by_row() -> None:
    truth = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 1]])
    logits = np.array([[2.0, -1, -1], [1, -2, -1], [-1, -1, 3], [-1, 1, 1]])
    evaluated = SimpleNamespace(predictions=logits, label_ids=truth.astype(np.float32))
    metrics = metrics_for(TOPICS)
    found = metrics(evaluated)
    # art: all right; law: 1 of 2 found, none wrongly; war: 1 of 1 found, one wrongly
    assert found["f1_macro"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert found["f1_micro"] == pytest.approx(2 * 4 / (5 + 5))
    assert found["subset_accuracy"] == 0.5
    cells = np.where(truth == 1, np.log1p(np.exp(-logits)), np.log1p(np.exp(logits)))
    assert found["loss"] == pytest.approx(cells.mean())
    metrics.thresholds = [0.5, 0.1, 0.9]  # which give the second row its law, and take war from the last
    assert given_labels(logits, metrics.thresholds).tolist() == [[1, 1, 0], [1, 1, 0], [0, 1, 1], [0, 1, 0]]
    assert metrics(evaluated)["subset_accuracy"] == 0.25


@pytest.mark.parametrize(
    ("labels", "metric", "greater"),
    [
        (CLASSES, "f1_macro", True),
        (CLASSES, "eval_loss", False),
        (NUMBERS, "mse", False),
        (NUMBERS, "pearson", True),
        (TOPICS, "subset_accuracy", True),
    ],
)
def test_the_best_model_has_more_of_some_metrics_and_less_of_others(
    labels: Labels, metric: str, greater: bool, tmp_path: Path
) -> None:
    training = TrainingArguments(output_dir=str(tmp_path), metric_for_best_model=metric, use_cpu=True)
    settle_best_metric(training, metrics_for(labels), {})
    assert training.greater_is_better is greater
    training.metric_for_best_model = "bleu"
    with pytest.raises(RequestError, match=r"--metric_for_best_model bleu: a .* has loss, "):
        settle_best_metric(training, metrics_for(labels), {})


def test_the_metric_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    path = tmp_path / "my_metric.py"
    path.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    names = Labels(TOKENS, ("O", "B-PER", "I-PER"))
    ids = np.array([[1, 2, 0], [1, 2, 2]])
    guessed = np.zeros((2, 3, 3))
    guessed[..., 0] = [[1, 2, 0], [1, 0, 2]]
    found = TaskMetrics(names, [str(path)])(SimpleNamespace(predictions=guessed, label_ids=ids))
    assert found["long_entities"] == pytest.approx(2 / 3)
