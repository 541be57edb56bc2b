"""Which columns hold the text and the label, found where that is unambiguous, and what kind of labels they are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune.errors import RequestError, plain
from finetune.run.flags.text import TokenDataArguments

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
TOKEN_NAMES, TAG_NAMES = ("tokens", "words"), ("tags", "ner_tags", "labels", "label")
LINE = "__line__"  # a column of our own: the line of a file in which a sentence begins
TEXT, CHAT, COMPLETION = "text", "messages", "completion"  # kinds of documents
HEAD_ROWS = 200  # of a table: by these its columns are found
MAX_SHOWN = 5
FEW = 20  # labels that are whole numbers: more of them may be amounts
WHOLE = re.compile(r"([+-]?\d+)\.0*")  # as pandas writes integers of a column that has held a NaN
HIDDEN_LABEL = -1  # GLUE's test sets on the hub
MULTI_LABEL = "multi_label_classification"  # transformers' word for it
TOKENS = "token_classification"
IGNORED = -100  # the label of a token that is not judged, as torch has it


@dataclass(frozen=True)
class Columns:
    """`text` is one column, or two for pairs."""

    text: tuple[str, ...]
    label: str | None  # None where only predictions are made
    others: tuple[str, ...] = ()  # which nothing reads

    def describe(self, labels: Sequence[str] = ()) -> str:
        """Which are read, and which are not; `labels` are the columns that `label` was made of, if it is none."""
        return said_columns({"text": self.text, "label": labels or list(filter(None, [self.label]))}, self.others)


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
        """The id of each class by its name, and by what `label_text` makes of that."""
        named = {name: i for i, name in enumerate(self.names)}
        return {label_text(name): i for name, i in named.items()} | named


def said_columns(read: Mapping[str, Sequence[str]], others: Sequence[str]) -> str:
    """Which columns are read, by what they are read as, and which are not; of many some."""
    shown = [f"{_some(names)} as {what}" for what, names in read.items() if names]
    return f"reads {', '.join(shown)}" + (f", not {_some(others)}" if others else "")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return " + ".join(map(plain, names[:MAX_SHOWN])) + more


def label_text(value: Any) -> str:
    """A label as the name it gets: 1, 1.0, "1" and "1.0" are one class."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    whole = WHOLE.fullmatch(text)
    return whole[1] if whole else text


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
    if label is None and needs_label and len(names) == 1:
        raise RequestError(
            f"{where}: has one column, {names[0][:30]!r}, and no label beside it. Give a csv, tsv, json or parquet "
            "file with a column of texts and one of labels. (The columns of a txt lie between tabs.)"
        )
    if label is None and needs_label:
        raise RequestError(f"{where}: cannot tell which column is the label. {_describe(head)} {_how_to_say_it(head)}")
    found = tuple(text) if text else _find_text(head, label, where)
    return Columns(found, label, tuple(name for name in names if name not in (*found, label)))


def _how_to_say_it(head: Sequence[dict[str, Any]]) -> str:
    hot = [name for name in head[0] if {str(row[name]) for row in head} == {"0", "1"}]
    if len(hot) > 1:
        return f"Say it by --label_column_name, or, if each is a label, --label_column_names {' '.join(hot)}."
    if {"tokens", "words"} & {name.lower() for name in head[0]}:
        return "Say it by --label_column_name; words with a tag each are for recipes/token_cls.py."
    return "Say it by --label_column_name."


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


def find_document_columns(
    names: Sequence[str], rows: Iterable[Mapping[str, Any]], column: str | None, where: str
) -> tuple[str, tuple[str, ...]]:
    """What kind of documents the rows of a table or stream hold, and the columns that matter. Raises RequestError."""
    if column is None and "messages" in names:
        return CHAT, ("messages",)
    if column is None and {"prompt", "completion"} <= set(names):
        return COMPLETION, ("prompt", "completion")
    lower = {name.lower(): name for name in names}
    found = column or next((lower[name] for name in TEXT_NAMES if name in lower), None)
    if found is None and len(names) == 1:
        found = names[0]
    if found is None or found not in names:
        given = f" (--text_column_name {column})" if column else ""
        raise RequestError(
            f"{where}: no column with text found{given}; it has {', '.join(names)}. Name one by --text_column_name, or "
            "give `messages`, or `prompt` and `completion`."
        )
    if column is None and found == "prompt":
        raise RequestError(f"{where}: has `prompt` without `completion`. Add it, or say --text_column_name prompt.")
    if not isinstance(value := next(iter(rows))[found], str | None):
        raise RequestError(
            f"{where}: column {found} holds {type(value).__name__} ({str(value)[:80]}), not text. Name another by "
            "--text_column_name, or give conversations as `messages` with `role` and `content`."
        )
    return TEXT, (found,)


def find_token_columns(names: Sequence[str], arguments: TokenDataArguments, said: str, is_labelled: bool) -> Columns:
    """Columns of words and of their tags. Raises RequestError."""
    there = [name for name in names if name != LINE]

    def find(flag: str, given: str | None, names: Sequence[str], needed: bool) -> str | None:
        found = given or next((name for name in names if name in there), None)
        if (found is None and needed) or (found is not None and found not in there):
            raise RequestError(
                f"{said}: has no column {found or ' or '.join(names)!r}; it has {', '.join(there)}. Say which "
                f"it is by --{flag}."
            )
        return found

    tokens = find("tokens_column_name", arguments.tokens_column_name, TOKEN_NAMES, True)
    tags = find("tags_column_name", arguments.tags_column_name, TAG_NAMES, is_labelled)
    return Columns((str(tokens),), tags, tuple(name for name in there if name not in (tokens, tags)))


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
    ids of the latter, or else of the former, is kept where it has all classes. `values` counts the raw labels. What
    numbers mean by themselves `is_regression` says; `task` overrules it. Raises RequestError where there is but one
    class, or where regression is asked for and a label is no number.
    """
    counts: Counter[str] = Counter()
    for value, count in values.items():
        counts[label_text(value)] += count
    numbers = {name: number for name in counts if (number := _number(name)) is not None}
    was_regression = trained is not None and trained.task == "regression" and len(numbers) == len(counts)
    by_itself = not class_names and (was_regression or is_regression(values))
    if task == "regression" or (task is None and by_itself):
        wrong = [name for name in counts if name not in numbers][:MAX_SHOWN]
        if wrong:
            raise RequestError(f"{where}: --task regression needs numbers as labels, but found {', '.join(wrong)}.")
        return Labels("regression", ())
    if len(counts) < 2:
        raise RequestError(
            f"{where}: the label is {next(iter(counts), None)!r} in every row ({sum(counts.values()):,}), and there is "
            "nothing to learn from one class. Check --label_column_name, and that the file is whole."
        )
    for known in (trained, Labels("classification", tuple(class_names or ()))):
        if known and set(counts) <= set(known.ids):
            return Labels("classification", known.names)
    ordered = sorted(counts, key=lambda name: numbers[name]) if len(numbers) == len(counts) else sorted(counts)
    return Labels("classification", tuple(ordered))


def is_regression(values: Collection[Any]) -> bool:
    """Whether labels are numbers to predict: some have fractions, or they are written as
    floats and take too many values for classes. Whole floats in a few values are classes: integers become 1.0 where a
    column has held a NaN, and stars are from 1.0 to 5.0."""
    numbers = {_number(str(value).strip()) for value in values}
    if None in numbers or len(numbers) < 2:
        return False
    if any(number % 1 for number in numbers if number is not None):
        return True
    return len(numbers) > FEW and are_written_as_floats(values)


def are_written_as_floats(values: Collection[Any]) -> bool:
    return any(isinstance(value, float) or (isinstance(value, str) and "." in value) for value in values)


def note_of_numbers(values: Collection[Any], labels: Labels, task: str | None) -> str:
    """What to say of labels that might have been taken for something else; nothing where `task` was given."""
    if task is not None or labels.task not in ("classification", "regression"):
        return ""
    if labels.task == "regression":
        return "its labels are numbers to predict (--task classification makes them classes)"
    if are_written_as_floats(values) and all(_number(str(value)) is not None for value in values):
        return "its labels are whole numbers, and so classes (--task regression predicts numbers)"
    if len(labels.names) > FEW and all(_number(name) is not None for name in labels.names):
        return "if its labels are amounts and no classes, --task regression"
    return ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
