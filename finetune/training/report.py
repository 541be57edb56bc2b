"""What a classification run leaves for a person to read: predictions, pictures, the model card."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.columns import Labels
from finetune.errors import RunError
from finetune.training.metrics import confusion, log_softmax
from finetune.training.model_card import model_card
from finetune.training.plots import plot_confusion, plot_training
from finetune.training.run_folder import read_metrics, write_text

SHOWN_AT_THE_END = (
    "eval_accuracy",
    "eval_f1_macro",
    "eval_pearson",
    "eval_loss",
    "predict_accuracy",
    "predict_pearson",
    "real_tokens_per_second",
)


def write_predictions(
    path: Path, logits: Any, labels: Labels, truth: Sequence[Any] | None, rows: Sequence[int]
) -> None:
    """One line a row, in input order: `index`, `prediction`, the `label` where known, and each class's probability.

    `index` is the row's number in the file, from 0, of those in `rows`: bad rows that were left out leave gaps.
    `logits` has shape (N, classes), or (N, 1) for regression.
    """
    logits = np.asarray(logits[0] if isinstance(logits, tuple) else logits, dtype=np.float64)
    temporary = path.with_name(path.name + ".unfinished")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        known = [] if truth is None else ["label"]
        writer.writerow(["index", "prediction", *known, *(f"probability_{name}" for name in labels.names)])
        probabilities = np.exp(log_softmax(logits)) if labels.names else None
        for i, row in enumerate(logits):
            predicted = labels.names[int(row.argmax())] if labels.names else repr(float(row[0]))
            true = [] if truth is None else [labels.names[truth[i]] if labels.names else truth[i]]
            chances = [] if probabilities is None else [f"{p:.6f}" for p in probabilities[i]]
            writer.writerow([rows[i], predicted, *true, *chances])
    temporary.replace(path)


def write_report(folder: Path, data: Any, evaluated: Any | None, source: Any) -> None:
    """`training_curve.png`, `confusion_matrix.png` and README.md, from what the run wrote and its last evaluation."""
    pictures = []
    if (folder / "metrics.jsonl").is_file():
        metric = "eval_pearson" if data.labels.task == "regression" else "eval_accuracy"
        plot_training(read_metrics(folder), folder / "training_curve.png", metric)
        pictures.append(("training_curve.png", "Loss and metric over steps"))
    if evaluated is not None and data.labels.names:
        counts = confusion(evaluated.predictions, evaluated.label_ids, len(data.labels.names))
        plot_confusion(counts, data.labels.names, folder / "confusion_matrix.png")
        pictures.append(("confusion_matrix.png", "True against predicted labels of the validation split"))
    card = model_card(
        account=data.account,
        metrics=_results(folder),
        environment=json.loads((folder / "environment.json").read_text(encoding="utf-8")),
        recipe="recipes/seq_cls.py",
        task=f"text {data.labels.task}",
        model=source.description,
        base_model=source.hub_id,
        pictures=pictures,
    )
    write_text(folder / "README.md", card)


def headline(folder: Path) -> str:
    """The last line of a run: where it is, and how well it did. Raises RunError where training has diverged."""
    results = _results(folder)
    steps = [row for row in read_metrics(folder) if "grad_norm" in row] if "train_loss" in results else []
    # A norm that is not finite is null in metrics.jsonl.
    if not math.isfinite(results.get("eval_loss") or 0.0) or (steps and steps[-1]["grad_norm"] is None):
        raise RunError(
            f"{folder}: loss or gradients are no longer numbers: training has diverged. Lower --learning_rate."
        )
    shown = ", ".join(f"{name} {results[name]:.4g}" for name in SHOWN_AT_THE_END if name in results)
    return f"done: {folder} ({shown})"


def _results(folder: Path) -> dict[str, Any]:
    path = folder / "all_results.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
