"""Common row formats for embedding training: pairs, with or without negatives; scored pairs; texts with a label."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import ClassLabel, Dataset

from finetune.data.columns import HIDDEN_LABEL, Columns, Labels, is_empty, label_text, said_columns
from finetune.data.seq2seq import SOURCE, TARGET, function_rows
from finetune.data.splits import HeldOut, open_splits, refuse_bad_rows, renamed, said_split
from finetune.data.tables import ROW, CleanTables, Table, hold_out, settle_splits
from finetune.errors import RequestError, plain
from finetune.run.flags.text import PreparationArguments
from finetune.run.recipes.embedding import EmbeddingDataArguments

PAIRS, SCORED, CLASSES = "pairs", "scored pairs", "texts with labels"  # what the rows are
JUDGED = "judged"  # our column for scores or label ids
NOT_JUDGED = object()  # marks rows that have neither score nor label
SHOWN = 60  # characters of a bad value shown in an error
ANCHORS = ("anchor", "query", "question")
POSITIVES = ("positive", "positives", "pos", "answer", "passage", "document")
NEGATIVE = re.compile(r"(?:hard_)?neg(?:ative)?s?(?:_?(\d+))?")
TWO_TEXTS = (("sentence1", "sentence2"), ("text1", "text2"), ("sentence_a", "sentence_b"), ("question1", "question2"))
SCORES = ("score", "similarity_score", "similarity", "label", "is_duplicate")
TEXTS, LABELS = ("text", "sentence"), ("label", "labels")
BUILT_IN = "built-in functions of Python's standard library, by the first line of their docstring, held out by package"
LISTED = "anchor and positive (and negative, or negative_1, ...); sentence1, sentence2 and score; or text and label"


@dataclass(frozen=True)
class Found:
    """What a table's rows are. `texts` names the columns of an anchor, a positive and negatives; of the two texts
    compared; or of the labeled text. `judged` names the column of the score or label."""

    kind: str
    texts: tuple[str, ...]
    judged: str | None = None


def text_column(number: int) -> str:
    """The name of a row's text column after reading."""
    return f"text_{number}"


def load_rows(arguments: EmbeddingDataArguments) -> tuple[Table, str]:
    """The raw splits given, and a line that says where they come from. Raises RequestError."""
    return open_splits(
        arguments,
        lambda: {
            split: Dataset.from_dict({"anchor": rows[TARGET], "positive": rows[SOURCE]})
            for split, rows in function_rows().items()
        },
        BUILT_IN,
    )


def find_rows(names: Sequence[str], where: str) -> Found:
    """Detects the format by column names. Raises RequestError if no columns have the usual names."""
    lower = {name.lower(): name for name in names}
    anchor = next((lower[name] for name in ANCHORS if name in lower), None)
    positive = next((lower[name] for name in POSITIVES if name in lower), None)
    if anchor and positive:
        numbered = [(int(found[1] or 0), name) for name in names if (found := NEGATIVE.fullmatch(name.lower()))]
        return Found(PAIRS, (anchor, positive, *(name for _, name in sorted(numbered))))
    two = next(((lower[a], lower[b]) for a, b in TWO_TEXTS if a in lower and b in lower), None)
    if two:
        judged = next((lower[name] for name in SCORES if name in lower), None)
        return Found(SCORED if judged else PAIRS, two, judged)
    text, label = (next((lower[name] for name in some if name in lower), None) for some in (TEXTS, LABELS))
    if text and label:
        return Found(CLASSES, (text,), label)
    other = " Preferences are for recipes/preference.py." if {"chosen", "rejected"} <= lower.keys() else ""
    raise RequestError(
        f"{where}: has no columns with known names: {LISTED}. It has {', '.join(map(plain, names))}. Rename "
        f"columns with --column_mapping OLD=NEW.{other}"
    )


def clean_rows(
    tables: Table,
    arguments: EmbeddingDataArguments,
    cut: PreparationArguments,
    seed: int,
    known: Any = None,
    trained: Any = None,
    said_prompt: str | None = None,
) -> CleanTables:
    """Columns `text_0`, `text_1`, ... and, for scored pairs and labeled texts, `judged`. `said_prompt` is the
    --document_prompt if the user gave one, not the model's own. Raises RequestError."""
    raw = renamed(arguments, tables)
    first = "train" if "train" in raw else next(iter(raw))
    found = find_rows(raw[first].column_names, said_split(arguments, first))
    if found.kind == CLASSES and said_prompt:
        raise RequestError(
            f"--document_prompt {said_prompt!r}: has no effect, because each row is one text with its label. "
            "--query_prompt is put before it."
        )
    read = {split: _texts_of(table, found, said_split(arguments, split)) for split, table in raw.items()}
    notes = []
    if found.judged and "test" in read and len(read) > 1 and not arguments.test_file:
        values = raw["test"][found.judged][:]
        if values and all(is_empty(value) or value == HIDDEN_LABEL for value in values):  # as in GLUE
            notes.append(f"the test split is left out, because its column {found.judged!r} is hidden")
            del read["test"]
    widths = {split: _width(rows) if found.kind == PAIRS else len(found.texts) for split, rows in read.items()}
    names, cleaned, skipped = _label_names(found, read, said_split(arguments, first)), {}, {}
    for split, rows in read.items():
        cleaned[split], skipped[split] = _table(
            rows, widths[split], names, cut.skip_bad_rows, said_split(arguments, split)
        )
    notes += [_cut_negatives(read[first], widths[first])] if found.kind == PAIRS else []
    cleaned, note = settle_splits(
        cleaned, cut, seed, lambda train: _held_out(train, found, len(names), cut.validation_fraction, seed)
    )
    others = tuple(name for name in raw[first].column_names if name not in (*found.texts, found.judged))
    columns = Columns(found.texts, found.judged, others)
    labels = Labels(found.kind, tuple(names))
    return CleanTables(cleaned, columns, labels, skipped, tuple(filter(None, (*notes, note))))


def said_rows(columns: Columns, kind: str) -> str:
    """Which columns are read as what, and which are ignored."""
    first, *more = columns.text
    read = {"text" if kind == CLASSES else "anchor": (first,), "positive": more[:1], "negatives": more[1:]}
    if kind == SCORED:
        read = {"text": columns.text}
    judged = (columns.label,) if columns.label else ()
    return said_columns(read | {"label" if kind == CLASSES else "score": judged}, columns.others)


Row = tuple[tuple[Any, ...], Any, int]  # texts, score or label, and the row's number in its file


def _texts_of(table: Dataset, found: Found, where: str) -> list[Row]:
    """Makes one row of each positive in a list, and one column of each negative in a list."""
    wanted = [*found.texts, *filter(None, [found.judged])]
    if missing := [name for name in wanted if name not in table.column_names]:
        raise RequestError(f"{where} has no column {missing[0]!r}. It has: {', '.join(table.column_names)}.")
    rows: list[Row] = []
    columns = [table[name][:] for name in found.texts]
    judged = table[found.judged][:] if found.judged else [NOT_JUDGED] * len(table)
    if found.judged and isinstance(table.features[found.judged], ClassLabel):
        judged = [None if value == HIDDEN_LABEL else value for value in judged]
    if found.kind == SCORED:
        judged = _scores(judged, str(found.judged), where)
    for number, (texts, value) in enumerate(zip(zip(*columns, strict=True), judged, strict=True)):
        first, *more = texts  # a list of several anchors is refused later, as it is not text
        first = first[0] if isinstance(first, list) and len(first) == 1 else first
        more = [[*text] if isinstance(text, list) else [text] for text in more]
        positives = (more[0] or [None]) if more else []
        said = [(first, positive, *chain(*more[1:])) for positive in positives] or [(first,)]
        rows += [(one, value, number) for one in said]
    return rows


def _scores(values: Sequence[Any], name: str, where: str) -> list[float]:
    """Raises RequestError for non-numbers, and for class ids of pairs, which have no order."""
    found = []
    for number, value in enumerate(values):
        try:
            found.append(math.nan if is_empty(value) else float(value))  # a bad row
        except (TypeError, ValueError):
            found.append(math.inf)
        if math.isinf(found[-1]):
            raise RequestError(
                f"{where}, row {number + 1}: {name} must be a number, and is {plain(str(value))!r}. Turn classes of "
                "pairs, such as entailment, into pairs with negatives: anchor, positive, negative."
            )
    kinds = {value for value in found if not math.isnan(value)}
    if name.lower() == "label" and len(kinds) > 2 and all(value.is_integer() for value in kinds):
        raise RequestError(
            f"{where}: the labels {', '.join(f'{kind:g}' for kind in sorted(kinds)[:5])} may be classes of pairs, such "
            "as in natural language inference, not scores. Give pairs with negatives (anchor, positive, negative), "
            f"or declare them as scores with --column_mapping {name}=score."
        )
    return found


def _label_names(found: Found, read: Mapping[str, Sequence[Row]], where: str) -> list[str]:
    if found.kind != CLASSES:
        return []
    names = sorted({label_text(value) for rows in read.values() for _, value, _ in rows if not is_empty(value)})
    if len(names) < 2:
        raise RequestError(f"{where}: {found.judged} is the same in every row, so there are no texts to push apart.")
    return names


def _table(rows: Sequence[Row], width: int, names: Sequence[str], skip: bool, where: str) -> tuple[Dataset, int]:
    """The rows that are complete, and the number left out. Raises RequestError."""
    for texts, _, number in rows:
        if wrong := next((text for text in texts if isinstance(text, list | dict)), None):
            raise RequestError(f"{where}, row {number + 1}: must have texts, and has {plain(str(wrong)[:SHOWN])!r}.")
    bad = [number for texts, value, number in rows if _is_bad(texts[:width], value)]
    refuse_bad_rows(where, bad, len(rows), "rows with an empty text, score or label", skip)
    kept = [row for row in rows if not _is_bad(row[0][:width], row[1])]
    if not kept:
        raise RequestError(f"{where} has no complete row. Check the column names.")
    ids = {name: i for i, name in enumerate(names)}
    table: dict[str, list[Any]] = {text_column(i): [str(texts[i]) for texts, _, _ in kept] for i in range(width)}
    judged = [ids[label_text(value)] if names else value for _, value, _ in kept]
    table |= {} if judged[0] is NOT_JUDGED else {JUDGED: judged}
    return Dataset.from_dict(table | {ROW: [number for _, _, number in kept]}), len(bad)


def _is_bad(texts: Sequence[Any], value: Any) -> bool:
    return any(map(is_empty, texts)) or (value is not NOT_JUDGED and is_empty(value))


def _width(rows: Sequence[Row]) -> int:
    """The smallest number of texts in any row that has an anchor and a positive."""
    return min((len(texts) for texts, value, _ in rows if not _is_bad(texts[:2], value)), default=2)


def _cut_negatives(rows: Sequence[Row], width: int) -> str:
    most = max(len(texts) for texts, _, _ in rows)
    return "" if most == width else f"rows have up to {most - 2} negatives; the first {width - 2} of each are read"


def _held_out(table: Dataset, found: Found, classes: int, fraction: float, seed: int) -> HeldOut:
    """Stratified by label; for pairs, all rows of one anchor go to the same side. Raises RequestError."""
    mend = "Add --validation_file."
    if found.kind == CLASSES:
        ids = np.array(table[JUDGED][:])
        kept, apart, note = hold_out(ids, classes, fraction, seed, mend)
        few = "no label has two held-out texts, so recall cannot be measured: raise --validation_fraction"
        return kept, apart, "; ".join(filter(None, (note, few * (len(set(ids[apart])) == len(apart)))))
    numbers: dict[str, int] = {}
    anchors = np.array([numbers.setdefault(text.strip(), len(numbers)) for text in table[text_column(0)]])
    if len(numbers) < 2:
        raise RequestError(f"all training rows have the same {found.texts[0]}, so none can be held out. {mend}")
    one_each: npt.NDArray[np.int64] = np.zeros(len(numbers), dtype=np.int64)
    _, held_out, note = hold_out(one_each, 0, fraction, seed, mend)
    is_held = np.isin(anchors, held_out)
    return np.flatnonzero(~is_held), np.flatnonzero(is_held), note


def texts_of(clean: CleanTables) -> Iterator[str]:
    """All training texts, for training a tokenizer."""
    table = clean.splits["train"]
    return chain.from_iterable(table[name] for name in table.column_names if name.startswith("text_"))
