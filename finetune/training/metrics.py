"""Metrics over whole evaluation sets, computed offline. They depend only on the rows, not on how the rows were spread
over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_softmax

from finetune.data.columns import IGNORED, MULTI_LABEL, TOKENS, Labels
from finetune.errors import RequestError, first_line
from finetune.training.metric_modules import LoadedMetrics, Metric, load_metrics
from finetune.training.thresholds import choose_thresholds, given_labels, save_thresholds, thresholds_of

MOST_SAMPLED = 8  # at most so many classes in the rows on which a metric is tried
LOSS = "loss"


class TaskMetrics(LoadedMetrics):
    """A `compute_metrics` for the Trainer: the metrics called `names`, each through `evaluate`, or else the task's own.

    It also returns `loss`, the exact mean over rows, which overrides the Trainer's: that is a mean over batches, in
    which rows that pad a rank's last batch count twice (transformers 5.23, Trainer.evaluation_loop).
    `thresholds` (labels,) are the probabilities from which labels are given, if a row may have several. Raises
    RequestError early for a metric that cannot be loaded or that fails on the task.
    """

    def __init__(
        self, labels: Labels, names: Sequence[str] | None = None, thresholds: Sequence[float] | None = None
    ) -> None:
        self.labels, self.thresholds = labels, thresholds
        self.task = TASKS[labels.task]
        inputs, _ = self.task.inputs(*self.task.sample(len(labels.names)), self)
        kind = labels.task.replace("_", " ")
        self.metrics = load_metrics(names or self.task.metrics, self.task.config, inputs, kind, (LOSS,))

    def __call__(self, evaluated: Any) -> dict[str, float]:
        inputs, loss = self.inputs(evaluated)
        return {LOSS: loss, **self.figures(inputs)}

    def inputs(self, evaluated: Any) -> tuple[dict[str, Any], float]:
        """The metrics' inputs from an evaluation, and its loss."""
        return self.task.inputs(first_output(evaluated.predictions), np.asarray(evaluated.label_ids), self)


class CountedMetrics:
    """A `compute_metrics` for classification that keeps the last evaluation's confusion matrix (classes, classes) in
    `counts`. It takes logits and ids, or with `of_sums` the sums of a pipeline's evaluation (1, 1 + classes^2): the
    loss over all rows and the flattened confusion matrix. Raises RequestError for a metric that cannot use these.
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
    """The metrics' inputs from a confusion matrix: each pair of classes that occurred, with its count as weight."""
    truth, predicted = np.nonzero(counts)
    return {"predictions": predicted, "references": truth, "sample_weight": counts[truth, predicted]}


def _try_on_counts(metric: Metric, classes: int) -> None:
    """Raises RequestError if a metric fails on weighted pairs of classes, or gives other results than on the rows."""
    counts = np.diag(np.arange(1, classes + 1))
    counts[0, -1] += 2  # the first class predicted as the last
    pairs = _pairs(counts)
    rows: dict[str, Any] = {
        name: np.repeat(pairs[name], pairs["sample_weight"]) for name in ("predictions", "references")
    }
    try:
        weighed, by_row = metric.compute(pairs), metric.compute(rows)
    except Exception as error:  # a user's metric may raise anything
        why = f"fails on that: {type(error).__name__}: {first_line(error, 300)}"
    else:
        wrong = [name for name in by_row if not np.isclose(weighed.get(name, math.nan), by_row[name], equal_nan=True)]
        if not wrong:
            return
        why = f"then gives another {wrong[0]} than for the rows one by one"
    raise RequestError(
        f"--metrics {metric.name}: a pipeline's evaluation passes no scores, and each pair of classes once, with its "
        f"count as sample_weight. The metric {why}. Use sample_weight in its _compute, or drop "
        "--pipeline_parallel_size."
    )


def metrics_for(labels: Labels, names: Sequence[str] | None = None, trained: Any | None = None) -> TaskMetrics:
    """The metrics called `names`, or the task's own. `trained` is the config of a model that is only evaluated; labels
    are then given at the thresholds in it."""
    return TaskMetrics(labels, names, thresholds_of(trained, labels))


def settle_thresholds(session: Any, metrics: TaskMetrics, evaluated: Any) -> Any:
    """Choose the thresholds that are best on the held-out rows, use them from now on, and write them into the run
    folder. Returns the evaluation with metrics at these thresholds. Does nothing if rows have one label each, or if a
    trained model has its own thresholds."""
    if metrics.labels.task != MULTI_LABEL or not session.training.do_train:
        return evaluated
    metrics.thresholds = choose_thresholds(first_output(evaluated.predictions), np.asarray(evaluated.label_ids))
    if session.launch.speaks:
        save_thresholds(session.folder, metrics.thresholds)
    anew = {f"eval_{name}": value for name, value in metrics(evaluated).items()}
    return evaluated._replace(metrics={**evaluated.metrics, **anew})


def metrics_of_run(session: Any, labels: Labels, source: Any) -> TaskMetrics:
    """The metrics that --metrics names, or the task's; tells the Trainer how to compare models. `source` is the
    model's."""
    trained = None if session.training.do_train else source.config
    metrics = metrics_for(labels, session.run.value("metrics"), trained)
    settle_best_metric(session.training, metrics, session.run.given)
    return metrics


def settle_best_metric(training: Any, metrics: LoadedMetrics | CountedMetrics, given: Mapping[str, Any]) -> None:
    """Tell the Trainer whether greater is better for --metric_for_best_model; it assumes so for all but losses. Raises
    RequestError for one that no evaluation will return."""
    name, there = training.metric_for_best_model, metrics.greater_is_better
    if name is None:
        return
    if name.removeprefix("eval_") not in there:
        kind = metrics.labels.task.replace("_", " ")
        raise RequestError(f"--metric_for_best_model {name}: a {kind} has {', '.join(there)}.")
    if "greater_is_better" not in given:
        training.greater_is_better = there[name.removeprefix("eval_")]


def language_metrics(
    tokens_per_byte: float, tokens_per_character: float, sources: Mapping[str, int] | None = None
) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` over the rows' figures (N, 3): loss in nats, correct tokens, tokens (models.chunked_loss).
    `sources` are the numbers of rows of each source, in order; `NAME_loss` is that source's loss. A pipeline's
    evaluation has only sums (1, 3)."""

    def metrics(evaluated: Any) -> dict[str, float]:
        rows = first_output(evaluated.predictions)
        nats, right, count = rows.sum(axis=0)
        ends = np.cumsum(list((sources or {}).values()))
        each = np.split(rows, ends[:-1]) if sources and len(rows) == ends[-1] else []
        sums = [part.sum(axis=0) for part in each]
        loss = nats / count
        bits = loss / math.log(2)
        return {
            "loss": float(loss),
            "perplexity": float(math.exp(min(loss, 700))),
            "bits_per_byte": float(bits * tokens_per_byte),
            "bits_per_character": float(bits * tokens_per_character),
            "token_accuracy": float(right / count),
            **{f"{name}_loss": float(part[0] / part[2]) for name, part in zip(sources or (), sums, strict=False)},
        }

    return metrics


def _class_inputs(logits: npt.NDArray[Any], ids: npt.NDArray[Any], _: Any) -> tuple[dict[str, Any], float]:
    """From logits (N, classes) and ids (N,). With two classes the score is the second one's, as ROC AUC expects."""
    chances = log_softmax(logits, axis=-1)
    scores = np.exp(chances)
    scores = scores[:, 1] if scores.shape[1] == 2 else scores
    inputs = {"predictions": logits.argmax(axis=-1), "references": ids, "prediction_scores": scores}
    return inputs, float(-chances[np.arange(len(ids)), ids].mean())


def _number_inputs(predictions: npt.NDArray[Any], truth: npt.NDArray[Any], _: Any) -> tuple[dict[str, Any], float]:
    """From predictions (N, 1) and numbers (N,). The loss is the mean squared error."""
    predicted, truth = predictions.reshape(-1), truth.astype(np.float64)
    return {"predictions": predicted, "references": truth}, float(((predicted - truth) ** 2).mean())


def _many_inputs(logits: npt.NDArray[Any], truth: npt.NDArray[Any], of: TaskMetrics) -> tuple[dict[str, Any], float]:
    """From logits (N, labels) and rows of 0 and 1 (N, labels). The loss is the mean binary cross entropy."""
    given = given_labels(logits, of.thresholds)
    inputs = {"predictions": given, "references": truth.astype(np.int64), "prediction_scores": expit(logits)}
    with np.errstate(invalid="ignore"):  # NaN: `refuse_divergence` reports it at the end of the run
        return inputs, float((np.logaddexp(0, logits) - truth * logits).mean())


def _token_inputs(guessed: npt.NDArray[Any], ids: npt.NDArray[Any], of: TaskMetrics) -> tuple[dict[str, Any], float]:
    """From the output of `finetune.training.entities.kept_of_tokens` (N, T, 3) and ids (N, T); IGNORED ids do not
    count. The loss is the mean over tokens."""
    judged, names = ids != IGNORED, np.asarray(of.labels.names)
    rows = [(names[guess[where].astype(int)], names[row[where]])
            for guess, row, where in zip(guessed[..., 0], ids, judged, strict=True)]  # fmt: skip
    inputs = {"predictions": [guess.tolist() for guess, _ in rows], "references": [row.tolist() for _, row in rows]}
    return inputs, float(guessed[..., 2][judged].mean()) if judged.any() else math.nan


def _class_sample(classes: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Each class predicted correctly once, and the first class once wrongly."""
    ids = np.arange(min(classes, MOST_SAMPLED))
    return np.eye(classes)[np.append(ids, 1 % classes)], np.append(ids, 0)


def _token_sample(tags: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Two sentences with every tag, one predicted correctly and one wrongly."""
    ids = np.stack([np.arange(tags), np.arange(tags)[::-1]])
    return np.stack([ids[:1].repeat(2, axis=0), np.ones_like(ids), np.zeros_like(ids)], axis=-1), ids


def _number_sample(_: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return np.array([[0.5], [1.0], [3.0]]), np.array([0.0, 1.0, 2.0])


def _many_sample(labels: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """One row per label with only that label, and one row without any, all predicted correctly."""
    truth = np.concatenate([np.eye(labels), np.zeros((1, labels))])
    return 2 * truth - 1, truth


@dataclass(frozen=True)
class _Task:
    """How a task is measured: its default metrics and their configuration in `evaluate`, what makes their inputs, and
    sample rows to try a metric on."""

    metrics: tuple[str, ...]
    config: str | None
    inputs: Callable[..., tuple[dict[str, Any], float]]
    sample: Callable[[int], tuple[npt.NDArray[Any], npt.NDArray[Any]]]


TASKS = {
    "classification": _Task(("accuracy", "f1", "matthews"), None, _class_inputs, _class_sample),
    "regression": _Task(("mse", "pearson"), None, _number_inputs, _number_sample),
    TOKENS: _Task(("entity_f1",), None, _token_inputs, _token_sample),
    MULTI_LABEL: _Task(("f1", "accuracy"), "multilabel", _many_inputs, _many_sample),
}


def confusion(predictions: Any, ids: Any, classes: int) -> npt.NDArray[Any]:
    """Counts (classes, classes): rows are true labels, columns predicted ones."""
    from sklearn.metrics import confusion_matrix  # slow import, so not before training

    counts: npt.NDArray[Any] = confusion_matrix(
        np.asarray(ids), first_output(predictions).argmax(axis=-1), labels=range(classes)
    )
    return counts


def first_output(predictions: Any) -> npt.NDArray[Any]:
    """The logits; some models return a tuple whose first element they are."""
    first = predictions[0] if isinstance(predictions, tuple) else predictions
    return np.asarray(first, dtype=np.float64)
