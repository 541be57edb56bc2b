"""Checks the columns of --train_file before torch is imported, without `datasets`, which takes a second to import."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from finetune.data.charset import UTF8, as_utf8
from finetune.data.column_names import renames_for
from finetune.data.columns import LINE, of_chats_alone
from finetune.data.files import KINDS, TEXT_FILES, csv_options
from finetune.data.find_columns import HEAD_ROWS, TRANSLATION, find_columns, find_pair, find_token_columns
from finetune.data.formats import find_format
from finetune.data.tag_ids import check_tag_names, tags_of_ids
from finetune.data.tag_schemes import PARSED, SHOWN, find_scheme, not_named, read_conll, refuse_untagged, spelt_alike
from finetune.data.word_rows import find_word_columns
from finetune.errors import RequestError
from finetune.run.flags.language import CorpusArguments
from finetune.run.flags.text import DataArguments, TokenDataArguments
from finetune.run.paths import named_in
from finetune.run.recipes.seq2seq import PairArguments
from finetune.safe_read.files import open_plain

HEAD_CHARACTERS = 10 << 20  # `datasets` infers the columns of a JSON file from this much

DATA = "the training data"  # in messages

Rows = list[dict[str, Any]]


def look_at_columns(run: Any) -> None:
    """Raises the RequestErrors of the data preparation early, from the first rows of --train_file. A file that cannot
    be read is left to the preparation, which explains more."""
    for name in named_in(run.value("train_file")):
        _look(run, name)


def _look(run: Any, name: str) -> None:
    look = next((LOOKS[group] for group in run.recipe.groups if group in LOOKS), None)
    path = Path(name).expanduser()
    if look is None or not path.is_file():
        return
    kind_of, check = look
    kind = kind_of(path.suffix.lower())
    rows = [{"text": ""}] if kind == "text" else _head(run, name, kind) if kind else []
    if rows:
        check(rows, run, name)


def _look_at_labels(rows: Rows, run: Any, _: str) -> None:
    data = run[DataArguments]
    if not data.label_column_names:
        find_columns(rows, data.text_column_names, data.label_column_name, DATA)


def _look_at_pairs(rows: Rows, run: Any, _: str) -> None:
    if TRANSLATION not in rows[0]:  # the preparation checks the languages
        find_pair(list(rows[0]), run[PairArguments], DATA, True)


def _look_at_corpus(rows: Rows, run: Any, name: str) -> None:
    asked = run[CorpusArguments]
    is_alone = len(named_in(run.value("train_file"))) < 2
    where, column = DATA if is_alone else f"{DATA} {Path(name).name}", asked.text_column_name
    renames = renames_for(asked.column_mapping, list(rows[0]), column, where, is_alone)
    rows = [{renames.get(name, name): value for name, value in row.items()} for row in rows]
    found = find_format(list(rows[0]), rows, column, where).kind
    for flag in of_chats_alone(found, asked):
        raise RequestError(f"{run.said(flag)}, which is for conversations, but {DATA} has {found}. Drop it.")


def _look_at_tags(rows: Rows, run: Any, name: str) -> None:
    said = f"--train_file {name}"
    if list(rows[0]) == ["tokens", LINE]:
        refuse_untagged([word for row in rows[:SHOWN] for word in row["tokens"]], said)
    arguments = run[TokenDataArguments]
    names = arguments.tag_names
    check_tag_names(names or ())
    if find_word_columns(list(rows[0]), arguments):
        return  # the preparation sees whether it has a row per word
    column = str(find_token_columns(list(rows[0]), arguments, said, True).label)
    tags = [row[column] for row in rows if isinstance(row[column], list)]
    if names and not name.lower().endswith(".parquet"):
        tags = [row for row in tags_of_ids(tags, names, said, column) if row]
    kinds = {type(tag) for row in tags for tag in row}
    if kinds == {int} and not name.lower().endswith(".parquet"):  # Parquet may store names for ids
        raise not_named(said, column, "names of tags", f", but numbers such as {tags[0]}")
    if kinds <= {str}:
        find_scheme(spelt_alike(tags, said)[0], said)


def _head(run: Any, name: str, kind: str) -> Rows:
    """The first rows, all with the same columns; empty if they cannot be read."""
    path, said = Path(name).expanduser(), f"--train_file {name}"
    open_plain(path, name=said).close()
    try:
        text = path if kind == "parquet" else as_utf8("train_file", name, run.value("encoding"), streaming=True)
    except (RequestError, LookupError):
        return []
    try:
        return READERS[kind](text, said)
    except (ValueError, TypeError, RecursionError, OSError, csv.Error):
        return []


def _of_parquet(path: Path, _: str) -> Rows:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        first = next(file.iter_batches(HEAD_ROWS), None)
        return [] if first is None else list(first.to_pylist())


def _of_json(path: Path, _: str) -> Rows:
    """Reads JSON Lines."""
    with path.open(encoding=UTF8) as file:
        lines = file.read(HEAD_CHARACTERS).split("\n")
        is_whole = not file.read(1)
    rows = [json.loads(line) for line in (lines if is_whole else lines[:-1]) if line.strip()]
    columns: dict[str, None] = {name: None for row in rows for name in row}
    return [{name: row.get(name) for name in columns} for row in rows[:HEAD_ROWS]]


def _of_conll(path: Path, said: str) -> Rows:
    rows = islice(read_conll(path, said), HEAD_ROWS)
    return [{"tokens": words, LINE: line} | ({} if tags is None else {"tags": tags}) for words, tags, line in rows]


def _of_csv(path: Path, said: str) -> Rows:
    options = csv_options(said, path, None)
    with path.open(encoding=UTF8, newline="") as file:
        reader = csv.reader(file, delimiter=options["sep"], quoting=options["quoting"])
        found = (row for row in reader if row)
        next(found if options["header"] == 0 else iter(()), None)
        rows = [dict(zip_longest(options["names"], row)) for row in islice(found, HEAD_ROWS)]
    if not rows:
        raise RequestError(f"{said}: the file has no rows.")
    return rows


READERS: dict[str, Callable[[Path, str], Rows]] = {
    "csv": _of_csv,
    "json": _of_json,
    "parquet": _of_parquet,
    "conll": _of_conll,
}
# By the flags that name a recipe's columns: how a file of some suffix is read, and what checks its rows.
LOOKS: dict[type, tuple[Callable[[str], str | None], Callable[[Rows, Any, str], None]]] = {
    DataArguments: (KINDS.get, _look_at_labels),
    TokenDataArguments: (lambda suffix: KINDS.get(suffix) if suffix in PARSED else "conll", _look_at_tags),
    PairArguments: (KINDS.get, _look_at_pairs),
    CorpusArguments: (lambda suffix: "text" if suffix in TEXT_FILES else KINDS.get(suffix), _look_at_corpus),
}
