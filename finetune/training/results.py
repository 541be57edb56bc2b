"""The files that a run leaves for people to read: predictions, pictures, the model card."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from finetune.data.columns import MULTI_LABEL, Labels
from finetune.data.mixture import sentence_of_sources
from finetune.errors import RunError
from finetune.report.charts import confusion_picture
from finetune.report.png import write_png
from finetune.report.run_curves import training_curves
from finetune.report.run_pictures import share_bars
from finetune.report.shapes import WIDE
from finetune.run.files import PICTURES
from finetune.run.flags.distillation import of_teacher
from finetune.training.merging import merged, use_of, use_of_writer
from finetune.training.metrics import TaskMetrics, confusion, first_output
from finetune.training.model_card import Card, results_of, write_card
from finetune.training.run_folder import read_metrics, write_json
from finetune.training.samples import Samples
from finetune.training.start import Session
from finetune.training.thresholds import given_labels, label_table

SHOWN_AT_THE_END = (
    "eval_accuracy", "eval_f1", "eval_f1_macro", "eval_f1_micro", "eval_pearson", "eval_loss", "eval_bits_per_byte",
    "eval_preference_accuracy", "eval_recall_at_10", "eval_spearman", "eval_entities_not_scored", "predict_accuracy",
    "predict_f1", "predict_pearson", "predict_entities_not_scored", "real_tokens_per_second",
)  # fmt: skip
SHOWN_LABELS = 50
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001  (full-width forms)
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")

USE_CLASSIFIER = """from transformers import pipeline

classify = pipeline("text-classification", "path/to/this/folder")
"""

USE_IMAGES = """from transformers import pipeline

classify = pipeline("image-classification", "path/to/this/folder")
print(classify("picture.png"))"""


def write_predictions(
    path: Path,
    logits: Any,
    labels: Labels,
    truth: Sequence[Any] | None,
    rows: Sequence[Any],
    row_name: str = "index",
    thresholds: Sequence[float] | None = None,
) -> None:
    """Write a CSV line per row, in input order: its name, `prediction`, `label` where known, each class's probability.

    `rows` are the names in column `row_name`: `index` is the row's number in the file, from 0, so bad rows that were
    left out leave gaps. `logits` has shape (N, classes), or (N, 1) for regression. If a row may have several labels,
    `prediction` and `label` are JSON lists, and `thresholds` are the probabilities from which a label is given.
    """
    logits = first_output(logits)
    if labels.task == MULTI_LABEL:
        predicted, chances = given_labels(logits, thresholds), expit(logits)
    elif labels.names:
        predicted, chances = logits.argmax(axis=-1), softmax(logits, axis=-1)
    else:
        predicted, chances = logits[:, 0], np.empty((len(logits), 0))
    columns = {row_name: rows, "prediction": _in_words(labels, predicted.tolist())}
    if truth is not None:
        columns["label"] = _in_words(labels, truth)
    temporary = path.with_name(path.name + ".unfinished")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *(f"probability_{name}" for name in labels.names)])
        for *cells, of_classes in zip(*columns.values(), chances, strict=True):
            writer.writerow([*map(_no_formula, cells), *(f"{chance:.6f}" for chance in of_classes)])
    temporary.replace(path)


def _in_words(labels: Labels, values: Sequence[Any]) -> Sequence[Any]:
    """Label names for ids or for rows of 0 and 1; numbers of a regression stay as they are."""
    if labels.task == MULTI_LABEL:
        named = ([name for name, is_given in zip(labels.names, row, strict=True) if is_given] for row in values)
        return [json.dumps(names, ensure_ascii=False) for names in named]
    return [labels.names[value] for value in values] if labels.names else values


def _no_formula(cell: Any) -> Any:
    """Quote a label or file name that a spreadsheet would evaluate as a formula; numbers stay as they are."""
    if isinstance(cell, str) and cell.startswith(FORMULA) and not NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


CURVES = {"regression": "eval_pearson", MULTI_LABEL: "eval_f1_macro"}


def write_report(
    session: Session, data: Any, source: Any, metrics: TaskMetrics, evaluated: Any | None, predicted: Any | None
) -> list[str]:
    """Write `predictions.csv`, README.md and pictures, from the run's files and its last evaluation."""
    folder, thresholds = session.folder, metrics.thresholds
    if predicted is not None:
        rows, path = data.splits["test"]["row"], folder / "predictions.csv"
        write_predictions(path, predicted.predictions, data.labels, predicted.label_ids, rows, thresholds=thresholds)
    pictures = pictures_of(folder, CURVES.get(data.labels.task, "eval_accuracy"))
    tables: list[Any] = []
    if evaluated is not None and data.labels.task == MULTI_LABEL:
        rows = label_table(first_output(evaluated.predictions), evaluated.label_ids, data.labels, thresholds)
        said = "At each label's threshold, chosen on these same rows if the run has trained:"
        tables = [write_per_label(folder, rows, "per_label", said, pictures)]
    elif evaluated is not None and data.labels.names:
        counts = confusion(evaluated.predictions, evaluated.label_ids, len(data.labels.names))
        pictures += write_confusion(folder, counts, data.labels)
    account = data.account
    card = Card(
        task=f"text {data.labels.task.replace('multi_label_', 'multi-label ')}",
        table=rows_table("rows", account),
        facts=[
            *sentences(data.columns, *account.notes, of_teacher(session.run.value)),
            *label_counts(account.label_counts),
        ],
        pictures=pictures,
        use=use_of(session, "classify", USE_CLASSIFIER) + _call(len(account.columns.text) == 2, data.labels.task),
        tables=tables,
    )
    write_card(session, source, account, card)
    return merged(session, source, data)


def write_image_report(
    session: Session, data: Any, source: Any, counts: Any | None, predicted: Any | None
) -> list[str]:
    """Like `write_report`, for an image classifier. `counts` (classes, classes) is the confusion matrix of its last
    evaluation, None without one."""
    folder, account, stages = session.folder, data.account, session.run.stages
    if predicted is not None:
        rows, path = data.names["test"], folder / "predictions.csv"
        write_predictions(path, predicted.predictions, data.labels, predicted.label_ids, rows, row_name="picture")
    pictures = pictures_of(folder, "eval_accuracy")
    if counts is not None:
        pictures += write_confusion(folder, counts, data.labels)
    card = Card(
        task="image classification",
        table=[
            ("split", "pictures", "left out"),
            *((name, n, account.skipped.get(name, 0)) for name, n in account.rows.items()),
        ],
        facts=[
            f"Images of {account.side} x {account.side} pixels, from {', '.join(account.sizes)}.",
            *([f"Trained as a pipeline of {stages} stage(s)."] if stages else []),
            *sentences(*account.notes),
            *label_counts(account.label_counts),
        ],
        pictures=pictures,
        use=USE_IMAGES,
    )
    write_card(session, source, account, card)
    return []


def write_language_report(
    session: Session, data: Any, source: Any, samples: Samples, note: str = "", tables: Sequence[Any] = ()
) -> list[str]:
    """Write `training_curve.png` and README.md of a language model, with its last sample, a `note` on how it was
    trained and more `tables`; with --merge_adapter, also the merged model."""
    folder, account, sample = session.folder, data.account, samples.last
    said = [*merged(session, source, data), *(["sample:", sample] if sample else [])]
    blocks = f"Blocks of {account.block_size} tokens, packing {account.packing}"
    blocks += "" if account.padding_share is None else f", {account.padding_share:.1%} padding"
    blocks += f", {account.left_over} tokens at the end of the training text left over" if account.left_over else ""
    card = Card(
        task="language modelling",
        table=[
            ("split", "documents", "tokens", "characters", "blocks"),
            *(
                (name, f"{n:,}", f"{account.tokens[name]:,}", f"{account.characters[name]:,}", account.blocks[name])
                for name, n in account.documents.items()
            ),
        ],
        facts=[
            f"{blocks}.",
            *sentences(account.columns, *account.notes, sentence_of_sources(results_of(folder).get("sources", {}))),
            *sentences(of_teacher(session.run.value), note),
        ],
        pictures=pictures_of(folder, "eval_bits_per_byte"),
        use=use_of_writer(session, samples.is_chat),
        sample=sample,
        tables=tables,
    )
    write_card(session, source, account, card)
    return said


def sentences(*notes: str) -> list[str]:
    """Turn the notes of the start line into sentences for the model card."""
    return [f"{note[0].upper()}{note[1:]}." for note in notes if note]


def rows_table(what: str, account: Any) -> list[Sequence[Any]]:
    """The model card's table of rows per text split."""
    rows = [(name, n, account.skipped.get(name, 0), account.truncated.get(name, 0)) for name, n in account.rows.items()]
    return [("split", what, "left out", f"cut to {account.max_seq_length} tokens"), *rows]


def write_confusion(folder: Path, counts: Any, labels: Labels) -> list[tuple[str, str]]:
    found = {"labels": list(labels.names), "counts": counts.tolist()}
    write_json(folder / "confusion_matrix.json", found)
    picture = confusion_picture(found, WIDE, len(labels.names))
    if picture is None:
        return []
    write_png(folder / "confusion_matrix.png", [picture])
    return [("confusion_matrix.png", "True against predicted labels of the validation split")]


def label_counts(counts: Mapping[str, int]) -> list[str]:
    shown = [f"{name} ({count:,})" for name, count in counts.items()][:SHOWN_LABELS]
    return ["Labels: " + ", ".join(shown) + "."] if shown else []


def write_per_label(
    folder: Path, rows: Sequence[dict[str, Any]], name: str, said: str, pictures: list[tuple[str, str]]
) -> tuple[str, list[Sequence[Any]]]:
    """Write a picture, which is added to `pictures`, and JSON. Returns a table with three decimals."""
    write_png(folder / f"{name}.png", [share_bars(rows, WIDE)])
    write_json(folder / f"{name}.json", list(rows))
    words = "Precision, recall and F1, and in parentheses the number of occurrences in the validation split"
    pictures.append((f"{name}.png", words))
    shown = [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows[:SHOWN_LABELS]]
    return said, [list(rows[0]), *shown]


def _call(is_pair: bool, task: str) -> str:
    text = '{"text": "One text.", "text_pair": "Another."}' if is_pair else '"Some text."'
    more = {"regression": ", function_to_apply='none'", MULTI_LABEL: ", top_k=None"}.get(task, "")
    return f"print(classify({text}{more}))"


def pictures_of(folder: Path, metric: str) -> list[tuple[str, str]]:
    pictures = []
    if curves := training_curves(read_metrics(folder) if (folder / "metrics.jsonl").is_file() else [], metric):
        write_png(folder / "training_curve.png", curves)
        pictures.append(("training_curve.png", "Loss and metric over steps"))
    return pictures + [(name, words) for name, words in PICTURES.items() if (folder / name).is_file()]


def refuse_divergence(folder: Path) -> None:
    """Raises RunError if training ended with a loss or gradients that are not finite."""
    results = results_of(folder)
    steps = [row for row in read_metrics(folder) if "grad_norm" in row] if "train_loss" in results else []
    # A norm that is not finite is null in metrics.jsonl. Steps in `nonfinite_steps` were skipped by a guard.
    has_diverged = bool(steps) and steps[-1]["grad_norm"] is None and not steps[-1].get("nonfinite_steps")
    if not math.isfinite(results.get("eval_loss") or 0.0) or has_diverged:
        raise RunError(
            f"{folder}: loss or gradients are no longer finite: training has diverged. Lower --learning_rate."
        )


def closing_line(folder: Path) -> str:
    """The last line of a run: its folder and its main metrics."""
    results = results_of(folder)
    found = {name: results[name] for name in SHOWN_AT_THE_END if name in results}
    shown = ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}" for name, value in found.items()
    )
    return f"done: {folder} ({shown})" if shown else f"done: {folder}"
