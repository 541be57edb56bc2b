"""The pictures in a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import font_manager, rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREY = "#2a6f97", "#e07a30", "#6b7280"
MANY_CLASSES = 12  # from here on cells carry smaller numbers
MOST_INCHES, MOST_NAMED = 24.0, 60  # classes beyond which the axes carry numbers alone
CELL_INCHES, LETTER_INCHES, SHOWN_LETTERS = 0.48, 0.09, 18
# Fonts with the letters that matplotlib's own lacks, in the order in which they are tried, where they are installed.
MORE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Noto Sans Arabic", "Noto Sans Devanagari")


def plot_training(rows: Sequence[dict[str, Any]], path: Path, metric: str) -> None:
    """Loss of training and evaluation over steps, and `metric` of the evaluation (its name in the logs) beside it."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    for key, label, colour, marker in (("loss", "training", BLUE, ""), ("eval_loss", "evaluation", ORANGE, "o")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            left.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=label)
    left.set_ylabel("loss")
    if left.lines:
        left.legend(frameon=False)
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    if points:
        right.plot(*zip(*points, strict=True), color=ORANGE, marker="o", markersize=4)
    right.set_ylabel(f"evaluation {metric.removeprefix('eval_')}")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def plot_confusion(counts: npt.NDArray[Any], names: Sequence[str], path: Path) -> None:
    """Counts (classes, classes), coloured by their share of the true label's row."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    with rc_context({"font.family": ["DejaVu Sans", *(name for name in MORE_FONTS if name in installed)]}):
        _confusion_figure(counts, names).savefig(path, dpi=120)


def plot_shares(rows: Sequence[dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """Precision, recall and F1 of each name as bars beside one another, the first name on top."""
    shown = list(zip(names, rows, strict=True))[:MOST_NAMED]
    figure = Figure(figsize=(7, 1.2 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(shown))
    for i, (figure_name, colour) in enumerate((("precision", BLUE), ("recall", ORANGE), ("f1", GREY))):
        axes.barh(
            places + 0.27 * (i - 1), [row[figure_name] for _, row in shown], 0.25, color=colour, label=figure_name
        )
    axes.set_yticks(places, [_short(f"{name} ({row['support']:,})") for name, row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def _short(name: str) -> str:
    return name if len(name) <= SHOWN_LETTERS else name[: SHOWN_LETTERS - 1] + "…"


def _confusion_figure(counts: npt.NDArray[Any], names: Sequence[str]) -> Figure:
    shown = [_short(name) for name in names]
    many = len(names) > MANY_CLASSES
    cells = min(max(2.4, CELL_INCHES * len(names)), MOST_INCHES)
    labels = LETTER_INCHES * max(map(len, shown))
    figure = Figure(figsize=(cells + labels + 1.6, cells + labels + 0.6), layout="constrained")
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    turned = 90 if LETTER_INCHES * max(map(len, shown)) > cells / len(names) else 0
    if len(names) <= MOST_NAMED:
        axes.set_xticks(range(len(names)), shown, rotation=turned)
        axes.set_yticks(range(len(names)), shown)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if len(names) <= 30:
        for row, column in np.argwhere(counts > 0):
            colour = "white" if shares[row, column] > 0.5 else "black"
            size = 7 if many else 10
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=colour, fontsize=size)
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true label")
    return figure
