"""Metrics over whole evaluation sets, computed offline. They depend on the rows alone, not on how the rows were spread
over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, matthews_corrcoef, mean_squared_error

from finetune.data.columns import Labels
from finetune.errors import RequestError

Metrics = Callable[[Any], dict[str, float]]


CLASSIFICATION = ("loss", "accuracy", "f1_macro", "matthews")
REGRESSION = ("loss", "mse", "pearson")


def check_metric(name: str | None, labels: Labels) -> None:
    """Raises RequestError for a --metric_for_best_model that no evaluation will give."""
    _refuse_other_than(REGRESSION if labels.task == "regression" else CLASSIFICATION, name, labels.task)


def _refuse_other_than(there: tuple[str, ...], name: str | None, kind: str) -> None:
    if name is not None and name.removeprefix("eval_") not in there:
        raise RequestError(f"--metric_for_best_model {name}: a {kind} has {', '.join(there)}.")


LANGUAGE = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "token_accuracy")


def settle_language_arguments(training: Any, corpus: Any, given: Mapping[str, Any]) -> None:
    """What the Trainer would take wrong for a language model, where it was not `given`: less is better for all metrics
    but one, and a stream has no end of an epoch to save or evaluate at. Raises RequestError for flags that a language
    model's run does not honour."""
    streaming = corpus.streaming
    if training.do_train and corpus.validation_file and not (corpus.train_file or corpus.dataset_name):
        raise RequestError("--validation_file without --train_file: give one, or evaluate alone by --do_train False.")
    if streaming and training.do_train and training.max_steps < 1:
        raise RequestError("--streaming: nobody knows how long a stream is. Say how long to train by --max_steps.")
    if streaming and training.dataloader_num_workers > 1:
        raise RequestError(
            f"--dataloader_num_workers {training.dataloader_num_workers}: a stream is read by one process. Give 1 to "
            "have it tokenized beside the training, or 0."
        )
    if training.label_smoothing_factor:
        raise RequestError(
            "--label_smoothing_factor: the Trainer's smoothing shifts labels that are shifted here. Drop it."
        )
    if not training.do_train and not training.do_eval:
        raise RequestError("--do_train and --do_eval are both False: there is nothing to do. Set one to True.")
    if not training.do_train and not given.get("model_name_or_path"):
        raise RequestError("--do_train False: there is no trained model to evaluate. Give --model_name_or_path.")
    if training.do_predict:
        raise RequestError("--do_predict: a language model writes samples instead (--sample_prompt). Drop it.")
    _refuse_other_than(LANGUAGE, training.metric_for_best_model, "language model")
    if training.metric_for_best_model and "greater_is_better" not in given:
        training.greater_is_better = training.metric_for_best_model.endswith("accuracy")
    for name in ("save_strategy", "eval_strategy"):
        if streaming and getattr(training, name) == "epoch":
            if name in given:
                raise RequestError(f"--{name} epoch: nobody knows how long a stream is. Use steps, with --save_steps.")
            setattr(training, name, type(getattr(training, name))("steps"))
            training.eval_steps = training.eval_steps or training.save_steps


def metrics_for(labels: Labels) -> Metrics:
    """A `compute_metrics` for the Trainer.

    It returns `loss` too, the exact mean over rows: the Trainer's own is a mean over batches, in which rows that fill
    up the last batch of a rank count twice (transformers 5.23, Trainer.evaluation_loop). The Trainer lets it win.
    """
    return regression_metrics if labels.task == "regression" else classification_metrics


def classification_metrics(evaluated: Any) -> dict[str, float]:
    """loss (cross entropy), accuracy, macro-F1 and Matthews, from logits (N, classes) and ids (N,)."""
    logits, ids = _logits(evaluated.predictions), np.asarray(evaluated.label_ids)
    predicted = logits.argmax(axis=-1)
    return {
        "loss": float(-log_softmax(logits)[np.arange(len(ids)), ids].mean()),
        "accuracy": float(accuracy_score(ids, predicted)),
        "f1_macro": float(f1_score(ids, predicted, average="macro", zero_division=0)),
        "matthews": float(matthews_corrcoef(ids, predicted)),
    }


class CountedMetrics:
    """The figures of `classification_metrics`, and in `counts` the confusion matrix of the last evaluation (classes,
    classes). It takes logits and ids, or the sums of a pipeline's evaluation (1, 1 + classes^2): the loss over all
    rows, and a confusion matrix row by row."""

    def __init__(self, classes: int) -> None:
        self.counts: npt.NDArray[Any] = np.zeros((classes, classes), dtype=np.int64)

    def __call__(self, evaluated: Any) -> dict[str, float]:
        if evaluated.label_ids is not None:
            self.counts = confusion(evaluated.predictions, evaluated.label_ids, len(self.counts))
            return classification_metrics(evaluated)
        loss, *cells = np.asarray(evaluated.predictions, dtype=np.float64)[0]
        self.counts = np.rint(cells).astype(np.int64).reshape(self.counts.shape)
        truth, predicted = np.nonzero(self.counts)  # each pair of classes that was seen, weighed by how often
        weights, rows = self.counts[truth, predicted], self.counts.sum()
        return {
            "loss": float(loss / rows),
            "accuracy": float(np.trace(self.counts) / rows),
            "f1_macro": float(f1_score(truth, predicted, sample_weight=weights, average="macro", zero_division=0)),
            "matthews": float(matthews_corrcoef(truth, predicted, sample_weight=weights)),
        }


def regression_metrics(evaluated: Any) -> dict[str, float]:
    """loss and mse (one and the same), and Pearson's correlation, from predictions (N, 1) and numbers (N,)."""
    predicted, truth = _logits(evaluated.predictions).reshape(-1), np.asarray(evaluated.label_ids, dtype=np.float64)
    if not np.isfinite(predicted).all():  # diverged, which the end of the run says; scikit-learn would raise here
        return {"loss": math.nan, "mse": math.nan, "pearson": 0.0}
    mse = float(mean_squared_error(truth, predicted))
    flat = predicted.std() == 0 or truth.std() == 0  # no correlation with a constant
    return {"loss": mse, "mse": mse, "pearson": 0.0 if flat else float(np.corrcoef(truth, predicted)[0, 1])}


def language_metrics(tokens_per_byte: float, tokens_per_character: float) -> Metrics:
    """A `compute_metrics` over the rows' figures (N, 3): loss in nats, right guesses, tokens (models.chunked_loss)."""

    def metrics(evaluated: Any) -> dict[str, float]:
        nats, right, count = _logits(evaluated.predictions).sum(axis=0)
        loss = nats / count
        bits = loss / math.log(2)
        return {
            "loss": float(loss),
            "perplexity": float(math.exp(min(loss, 700))),
            "bits_per_byte": float(bits * tokens_per_byte),
            "bits_per_character": float(bits * tokens_per_character),
            "token_accuracy": float(right / count),
        }

    return metrics


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Log-probabilities along the last axis, in float64."""
    shifted: npt.NDArray[Any] = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def confusion(predictions: Any, ids: Any, classes: int) -> npt.NDArray[Any]:
    """Counts (classes, classes): rows are true labels, columns predicted ones."""
    counts: npt.NDArray[Any] = confusion_matrix(
        np.asarray(ids), _logits(predictions).argmax(axis=-1), labels=range(classes)
    )
    return counts


def _logits(predictions: Any) -> npt.NDArray[Any]:
    """Some models give a tuple of which the logits are the first."""
    first = predictions[0] if isinstance(predictions, tuple) else predictions
    return np.asarray(first, dtype=np.float64)
