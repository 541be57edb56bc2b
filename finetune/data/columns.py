"""Which columns hold the text and the label, found where that is unambiguous, and what kind of labels they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune.errors import RequestError

LABEL_NAMES = ("label", "labels", "sentiment", "class", "category", "target", "y", "score", "stars", "rating")
SURE_LABEL_NAMES = ("label", "labels")  # whatever else is there
TEXT_NAMES = ("text", "sentence", "review", "content", "document", "body", "comment", "tweet", "message", "question")
# The layouts of the GLUE tasks (transformers, examples/pytorch/text-classification/run_glue.py) and their like.
PAIR_NAMES = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("query", "passage"),
)
MAX_SHOWN = 5
HIDDEN_LABEL = -1  # GLUE's test sets on the hub
MULTI_LABEL = "multi_label_classification"  # transformers' word for it
TOKENS = "token_classification"
IGNORED = -100  # the label of a token that is not judged, as torch has it


@dataclass(frozen=True)
class Columns:
    """`text` is one column, or two for pairs."""

    text: tuple[str, ...]
    label: str | None  # None where only predictions are made


@dataclass(frozen=True)
class Labels:
    """`names` are the classes in the order of their ids; empty for regression."""

    task: str  # "classification", "regression", MULTI_LABEL or TOKENS
    names: tuple[str, ...]

    def encode(self, value: Any) -> int | float:
        """The id of a label, or its number for regression. Raises KeyError for a class that is not among `names`."""
        return float(value) if self.task == "regression" else self.ids[label_text(value)]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each class by its name."""
        return {name: i for i, name in enumerate(self.names)}


def label_text(value: Any) -> str:
    """A label as the name it gets: 1, 1.0 and "1" are one class."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def names_of_ids(ids: Sequence[int | None] | None, names: Sequence[str], where: str) -> list[str] | None:
    """What a row's ids are called, "" for one that is not there; None where a test set hides them. Raises
    RequestError for an id that has no name."""
    if ids is None or HIDDEN_LABEL in ids:
        return None
    if wrong := [i for i in ids if i is not None and not 0 <= i < len(names)]:
        raise RequestError(
            f"{where}: has the id {wrong[0]}, but the {len(names)} names have ids from 0 to {len(names) - 1}. Mend it."
        )
    return ["" if i is None else names[i] for i in ids]


def find_columns(
    head: Sequence[dict[str, Any]], text: Sequence[str] | None, label: str | None, where: str, needs_label: bool = True
) -> Columns:
    """Text and label columns of a table, from its first rows `head`. What is given by flag is only checked.

    Raises RequestError, listing the columns with a value each, where the choice is not clear.
    """
    names = list(head[0])
    for wanted, flag in [(name, "text_column_names") for name in text or ()] + [(label, "label_column_name")]:
        if wanted is not None and wanted not in names:
            raise RequestError(f"{where} has no column {wanted!r} (--{flag}). {_describe(head)}")
    if text and len(text) > 2:
        raise RequestError(f"--text_column_names takes one column, or two for pairs, but {len(text)} were given.")
    if label is not None and label in (text or ()):
        raise RequestError(
            f"--text_column_names and --label_column_name are both {label!r}. One column cannot be text and label. "
            f"{_describe(head)}"
        )
    label = label or _find_label(head, set(text or ()))
    if label is None and needs_label:
        raise RequestError(
            f"{where}: cannot tell which column is the label. {_describe(head)} Say it by --label_column_name."
        )
    return Columns(tuple(text) if text else _find_text(head, label, where), label)


def _find_label(head: Sequence[dict[str, Any]], taken: set[str]) -> str | None:
    lower = {name.lower(): name for name in head[0] if name not in taken}
    named = [name for name in LABEL_NAMES if name in lower]
    if named and (len(named) == 1 or named[0] in SURE_LABEL_NAMES):
        return lower[named[0]]
    if named:
        return None
    if any(name in lower for name in TEXT_NAMES):
        return None
    # No telling name: the one column whose values recur, in a table that has others.
    recurring = [name for name in lower.values() if len({str(row[name]) for row in head}) <= max(2, len(head) // 3)]
    return recurring[0] if len(recurring) == 1 and len(lower) > 1 else None


def _find_text(head: Sequence[dict[str, Any]], label: str | None, where: str) -> tuple[str, ...]:
    names = [name for name in head[0] if name != label]
    lower = {name.lower(): name for name in names}
    for first, second in PAIR_NAMES:
        if first in lower and second in lower:
            return lower[first], lower[second]
    by_name = [lower[name] for name in TEXT_NAMES if name in lower]
    strings = [name for name in names if any(isinstance(row[name], str) for row in head)]
    wordy = [name for name in strings if any(" " in str(row[name] or "").strip() for row in head)]
    for found in (by_name, wordy, strings):
        if len(found) == 1:
            return (found[0],)
    raise RequestError(
        f"{where}: cannot tell which column is the text. {_describe(head)} Say it by --text_column_names."
    )


def _describe(head: Sequence[dict[str, Any]]) -> str:
    shown = "; ".join(f"{name} (such as {str(value)[:30]!r})" for name, value in head[0].items())
    return f"It has the columns: {shown}."


def is_empty(value: Any) -> bool:
    """True for None, NaN and text of blanks."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip()


def find_labels(
    values: Counter[Any],
    task: str | None,
    class_names: Sequence[str] | None,
    where: str,
    trained: Labels | None = None,
) -> Labels:
    """What the training labels are: classes (integers or text), or numbers to predict.

    `class_names` are those that the data set itself declares, `trained` the labels of a trained model: the order of
    ids of the latter, or else of the former, is kept where it has all classes. `values` counts the raw labels.
    Fractions mean regression, and so does a column of floating-point numbers; `task` overrules both. Raises
    RequestError where there is but one class, or where regression is asked for and a label is no number.
    """
    counts: Counter[str] = Counter()
    for value, count in values.items():
        counts[label_text(value)] += count
    numbers = {name: number for name in counts if (number := _number(name)) is not None}
    all_numbers = len(numbers) == len(counts)
    written_as_floats = any(isinstance(v, float) or (isinstance(v, str) and "." in v) for v in values)
    fractions = not class_names and all_numbers and written_as_floats and len(counts) > 1
    if task == "regression" or (task is None and fractions):
        wrong = [name for name in counts if name not in numbers][:MAX_SHOWN]
        if wrong:
            raise RequestError(f"{where}: --task regression needs numbers as labels, but found {', '.join(wrong)}.")
        return Labels("regression", ())
    if len(counts) < 2:
        raise RequestError(
            f"{where}: the label is {next(iter(counts), None)!r} in every row ({sum(counts.values()):,}), and there is "
            "nothing to learn from one class. Check --label_column_name, and that the file is whole."
        )
    for names in (trained.names if trained else (), class_names or ()):
        if set(counts) <= set(names):
            return Labels("classification", tuple(names))
    return Labels(
        "classification", tuple(sorted(counts, key=lambda name: numbers[name]) if all_numbers else sorted(counts))
    )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
