"""What a run leaves for a person to read: predictions, pictures, the model card."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.columns import Labels
from finetune.errors import RunError
from finetune.training.metrics import confusion, log_softmax
from finetune.training.model_card import Card, results_of, write_card
from finetune.training.plots import plot_confusion, plot_training
from finetune.training.run_folder import read_metrics, write_json

SHOWN_AT_THE_END = (
    "eval_accuracy",
    "eval_f1_macro",
    "eval_pearson",
    "eval_loss",
    "eval_bits_per_byte",
    "predict_accuracy",
    "predict_pearson",
    "real_tokens_per_second",
)
SHOWN_LABELS = 50

USE_CLASSIFIER = """from transformers import pipeline

classify = pipeline("text-classification", "path/to/this/folder")
"""

USE_LANGUAGE_MODEL = """import finetune.models.gptlite  # makes GPT-lite known to transformers; other models do without
from transformers import pipeline

write = pipeline("text-generation", "path/to/this/folder")
print(write("The ", max_new_tokens=100)[0]["generated_text"])"""


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
    metric = "eval_pearson" if data.labels.task == "regression" else "eval_accuracy"
    pictures = _pictures(folder, metric)
    if evaluated is not None and data.labels.names:
        counts = confusion(evaluated.predictions, evaluated.label_ids, len(data.labels.names))
        plot_confusion(counts, data.labels.names, folder / "confusion_matrix.png")
        write_json(folder / "confusion_matrix.json", {"labels": list(data.labels.names), "counts": counts.tolist()})
        pictures.append(("confusion_matrix.png", "True against predicted labels of the validation split"))
    account = data.account
    facts = [f"Text: {', '.join(account.columns.text)}."]
    if account.label_counts:
        counted = list(account.label_counts.items())[:SHOWN_LABELS]
        facts.append("Labels: " + ", ".join(f"{name} ({count:,})" for name, count in counted) + ".")
    card = Card(
        task=f"text {data.labels.task}",
        pipeline_tag="text-classification",
        model=source.description,
        base_model=source.hub_id,
        recipe="recipes/seq_cls.py",
        source=account.source,
        table=[
            ("split", "rows", "left out", f"cut to {account.max_seq_length} tokens"),
            *(
                (name, n, account.skipped.get(name, 0), account.truncated.get(name, 0))
                for name, n in account.rows.items()
            ),
        ],
        facts=facts,
        pictures=pictures,
        use=USE_CLASSIFIER + _call(len(account.columns.text) == 2, not data.labels.names),
    )
    write_card(folder, card)


def write_language_report(
    folder: Path, data: Any, source: Any, sample: str, recipe: str = "recipes/causal_lm.py", note: str = ""
) -> None:
    """`training_curve.png` and README.md of a language model, with what it wrote last and a `note` on how it was
    trained."""
    account = data.account
    facts = [
        f"Blocks of {account.block_size} tokens, packing {account.packing}"
        + ("" if account.padding_share is None else f", {account.padding_share:.1%} padding")
        + (f", {account.left_over} tokens at the end of the training text left over" if account.left_over else "")
        + ".",
        *([note] if note else []),
    ]
    pictures = _pictures(folder, "eval_bits_per_byte")
    if (folder / "schedule.png").is_file():
        pictures.append(("schedule.png", "A step of the pipeline, planned and measured"))
    card = Card(
        task="language modelling",
        pipeline_tag="text-generation",
        model=source.description,
        base_model=source.hub_id,
        recipe=recipe,
        source=account.source,
        table=[
            ("split", "documents", "tokens", "characters", "blocks"),
            *(
                (name, f"{n:,}", f"{account.tokens[name]:,}", f"{account.characters[name]:,}", account.blocks[name])
                for name, n in account.documents.items()
            ),
        ],
        facts=facts,
        pictures=pictures,
        use=USE_LANGUAGE_MODEL,
        sample=sample,
    )
    write_card(folder, card)


def _call(is_pair: bool, is_regression: bool) -> str:
    text = '{"text": "One text.", "text_pair": "Another."}' if is_pair else '"Some text."'
    return f"print(classify({text}{', function_to_apply=' + repr('none') if is_regression else ''}))"


def _pictures(folder: Path, metric: str) -> list[tuple[str, str]]:
    pictures = []
    if (folder / "metrics.jsonl").is_file():
        plot_training(read_metrics(folder), folder / "training_curve.png", metric)
        pictures.append(("training_curve.png", "Loss and metric over steps"))
    if (folder / "profile" / "parts.png").is_file():
        pictures.append(("profile/parts.png", "Where a step's time went, by part and rank"))
    return pictures


def headline(folder: Path) -> str:
    """The last line of a run: where it is, and how well it did. Raises RunError where training has diverged."""
    results = results_of(folder)
    steps = [row for row in read_metrics(folder) if "grad_norm" in row] if "train_loss" in results else []
    # A norm that is not finite is null in metrics.jsonl.
    if not math.isfinite(results.get("eval_loss") or 0.0) or (steps and steps[-1]["grad_norm"] is None):
        raise RunError(
            f"{folder}: loss or gradients are no longer numbers: training has diverged. Lower --learning_rate."
        )
    shown = ", ".join(f"{name} {results[name]:.4g}" for name in SHOWN_AT_THE_END if name in results)
    return f"done: {folder} ({shown})"
