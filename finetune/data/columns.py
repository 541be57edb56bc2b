"""The columns to read, the kind of labels they hold, and HTML line breaks in their texts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from finetune.errors import RequestError, plain
from finetune.run.flags.language import OF_CHATS, CorpusArguments

LINE = "__line__"  # our own column: the line of the file on which a sentence begins
TEXT, CHAT, COMPLETION = "text", "messages", "completion"  # kinds of documents
TOOLS = "tools"  # an optional column next to `messages`: the functions that a conversation offers
MAX_SHOWN = 5
SHOWN_CHARACTERS = 40  # of a label
FEW = 20  # distinct whole-number labels; more of them may be quantities
WHOLE = re.compile(r"([+-]?\d+)\.0*")  # pandas writes integers this way in a column with NaNs
HIDDEN_LABEL = -1  # GLUE's test sets on the hub
MULTI_LABEL = "multi_label_classification"  # transformers' name for it
TOKENS = "token_classification"
WIDTHS = "widths"  # of a batch: the longest first, second, ... text of its rows, in tokens
IGNORED = -100  # the label of tokens outside the loss, as in torch


@dataclass(frozen=True)
class Columns:
    """`text` is one column, or two for pairs."""

    text: tuple[str, ...]
    label: str | None  # None if only predictions are made
    others: tuple[str, ...] = ()  # ignored

    def describe(self, labels: Sequence[str] = ()) -> str:
        """Which columns are read, and which are ignored; `labels` names the columns merged into `label`, if any."""
        return said_columns({"text": self.text, "label": labels or list(filter(None, [self.label]))}, self.others)


@dataclass(frozen=True)
class Labels:
    """`names` lists the classes by id; empty for regression. `columns` are the text columns that a trained model was
    trained on; empty if its config does not say."""

    task: str  # "classification", "regression", MULTI_LABEL or TOKENS
    names: tuple[str, ...]
    columns: tuple[str, ...] = field(default=(), compare=False)

    def encode(self, value: Any) -> int | float:
        """The id of a label, or its number for regression. Raises KeyError for an unknown class."""
        return float(value) if self.task == "regression" else self.ids[label_text(value)]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Maps each class name, raw and normalized by `label_text`, to its id."""
        named = {name: i for i, name in enumerate(self.names)}
        return {label_text(name): i for name, i in named.items()} | named


def said_counts(counts: Mapping[str, int]) -> str:
    """Each label with its count if there are few; otherwise the rarest and the most frequent."""
    shown = sorted((repr(plain(name)[:SHOWN_CHARACTERS]), count) for name, count in counts.items())
    if len(shown) <= MAX_SHOWN:
        return ", ".join(f"{name} {count:,}" for name, count in shown)
    (rarest, fewest), *_, (commonest, most) = sorted(shown, key=lambda one: (one[1], one[0]))
    return f"from {fewest:,} of {rarest} to {most:,} of {commonest}"


def said_data(account: Any, columns: str, what: str, *more: str, unit: str = "rows", flag: str = "train_file") -> str:
    """The log line for a data set whose rows are called `what`, with further remarks `more`: what is used, and which
    flag changes it. Bad ones are counted by the `unit`."""
    rows = ", ".join(f"{count:,} {split}" for split, count in account.rows.items())
    left_out = sum(account.skipped.values())
    own = f"--{flag} takes your own" if account.source.startswith("built-in") else ""
    said = (f"{left_out:,} bad {unit} left out" if left_out else "", columns, *account.notes, *more, own)
    return f"data: {account.source} ({'; '.join([f'{rows} {what}', *filter(None, said)])})"


def said_columns(read: Mapping[str, Sequence[str]], others: Sequence[str]) -> str:
    """Which columns are read as what, and which are ignored; long lists are shortened."""
    shown = [f"{listed(names)} as {what}" for what, names in read.items() if names]
    return f"reads {', '.join(shown)}" + (f", not {listed(others)}" if others else "")


def listed(names: Sequence[str], joint: str = " + ") -> str:
    """The names joined to a text; a long list is shortened."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return joint.join(map(plain, names[:MAX_SHOWN])) + more


def label_text(value: Any) -> str:
    """A label's normalized name: 1, 1.0, "1" and "1.0" are one class."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    whole = WHOLE.fullmatch(text)
    return whole[1] if whole else text


def by_text(values: Mapping[Any, int]) -> Counter[str]:
    """The number of rows of each label, by normalized name."""
    counts: Counter[str] = Counter()
    for value, count in values.items():
        counts[label_text(value)] += count
    return counts


def names_of_ids(ids: Sequence[int | None] | None, names: Sequence[str], where: str) -> list[str] | None:
    """The names of a row's ids, "" for a missing id; None if a test set hides the labels. Raises RequestError for an id
    without a name."""
    if ids is None or HIDDEN_LABEL in ids:
        return None
    if wrong := [i for i in ids if i is not None and not 0 <= i < len(names)]:
        raise RequestError(
            f"{where}: has the id {wrong[0]}, but the {len(names)} names have ids from 0 to {len(names) - 1}. Fix it."
        )
    return ["" if i is None else names[i] for i in ids]


def is_empty(value: Any) -> bool:
    """True for None, NaN and blank text."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip()


def find_labels(
    values: Counter[Any], task: str | None, class_names: Sequence[str] | None, where: str, trained: Labels | None = None
) -> Labels:
    """Decides whether the training labels are classes (integers or text) or numbers to predict.

    `class_names` are declared by the data set, `trained` holds a trained model's labels; ids follow the model, or else
    the data set, if it has all the classes. `values` counts the raw labels. `is_regression` decides about numeric
    labels unless `task` is given. Raises RequestError for a single class, or if regression is asked for and a label is
    not a number.
    """
    counts = by_text(values)
    numbers = {name: float(name) for name in counts if is_number(name)}
    infinite = [name for name in counts if math.isinf(number_in(name) or 0.0)]
    if task is None and infinite and is_regression([name for name in counts if name not in infinite]):
        raise RequestError(
            f"{where}: the label {infinite[0]!r} is not finite, but the others are numbers to predict. Fix or drop its "
            "rows, or give --task classification if each label names a class."
        )
    was_regression = trained is not None and trained.task == "regression" and len(numbers) == len(counts)
    by_itself = not class_names and (was_regression or is_regression(values))
    if task == "regression" or (task is None and by_itself):
        wrong = [name for name in counts if name not in numbers][:MAX_SHOWN]
        if wrong:
            raise RequestError(f"{where}: --task regression needs numbers as labels, but found {', '.join(wrong)}.")
        return Labels("regression", ())
    if len(counts) < 2:
        raise RequestError(
            f"{where}: the label is {next(iter(counts), None)!r} in every row ({sum(counts.values()):,}), so there is "
            "nothing to learn. Check --label_column_name, and that the file is complete."
        )
    for known in (trained, Labels("classification", tuple(class_names or ()))):
        if known and set(counts) <= set(known.ids):
            return Labels("classification", known.names)
    ordered = sorted(counts, key=lambda name: numbers[name]) if len(numbers) == len(counts) else sorted(counts)
    return Labels("classification", tuple(ordered))


def is_regression(values: Collection[Any]) -> bool:
    """Whether numeric labels are quantities to predict: some have fractions, or they are written as floats and take too
    many values for classes. A few distinct whole floats are classes: integers become 1.0 in a column with a NaN, and
    ratings go from 1.0 to 5.0."""
    texts = {str(value).strip() for value in values}
    if not all(map(is_number, texts)) or len(numbers := set(map(float, texts))) < 2:
        return False
    if any(number % 1 for number in numbers):
        return True
    return len(numbers) > FEW and are_written_as_floats(values)


def are_written_as_floats(values: Collection[Any]) -> bool:
    return any(isinstance(value, float) or (isinstance(value, str) and "." in value) for value in values)


def note_of_numbers(values: Collection[Any], labels: Labels, task: str | None) -> str:
    """A note about labels whose kind is not obvious; empty if `task` is given."""
    if task is not None or labels.task not in ("classification", "regression"):
        return ""
    if labels.task == "regression":
        return "its labels are numbers to predict (--task classification makes them classes)"
    if are_written_as_floats(values) and all(is_number(str(value)) for value in values):
        return "its labels are whole numbers, and so classes (--task regression predicts numbers)"
    if len(labels.names) > FEW and all(map(is_number, labels.names)):
        return "if its labels are amounts and no classes, --task regression"
    return ""


def number_in(text: str) -> float | None:
    """The number that a text is, which may be infinite or NaN; None for other texts."""
    try:
        return float(text)
    except ValueError:
        return None


def is_number(text: str) -> bool:
    """Whether it is written as a finite number."""
    number = number_in(text)
    return number is not None and math.isfinite(number)


def of_chats_alone(kind: str, given: CorpusArguments) -> Iterator[str]:
    """The given flags that have no effect on documents of this kind."""
    names = () if kind == CHAT else OF_CHATS[:-1] if kind == COMPLETION else OF_CHATS
    return (name for name in names if getattr(given, name) != getattr(CorpusArguments, name))


BREAK = re.compile(r"</?br\b[^<>]*>", re.IGNORECASE)


def without_html_breaks(rows: Any, columns: Columns) -> Any:
    """Replaces each <br> in the texts of a table or stream with a newline."""

    def clean(row: dict[str, Any]) -> dict[str, Any]:
        texts = {name: row[name] for name in columns.text}
        return {name: BREAK.sub("\n", text) if isinstance(text, str) else text for name, text in texts.items()}

    return rows.map(clean, features=rows.features)
