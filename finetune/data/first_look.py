"""Columns of --train_file, looked at before torch is imported; without `datasets`, which takes a second by itself."""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.charset import UTF8, as_utf8
from finetune.data.files import KINDS, TEXT_FILES, csv_options
from finetune.data.find_columns import HEAD_ROWS, find_columns, find_document_columns, find_token_columns
from finetune.errors import RequestError
from finetune.run.flags.language import CorpusArguments
from finetune.run.flags.text import DataArguments, TokenDataArguments
from finetune.safe_read.files import open_plain

HEAD_CHARACTERS = 10 << 20  # of which `datasets` makes its first table of JSON, whose columns all others must have

Rows = list[dict[str, Any]]


def look_at_columns(run: Any) -> None:
    """Raises RequestError as the preparation of the data would, by the first rows of --train_file. Of a file that is
    not as its name says, the preparation says more."""
    name, flags = run.value("train_file"), run.recipe.flags
    path = Path(name or "").expanduser()
    suffix = path.suffix.lower()
    kind = KINDS.get(suffix)
    wants_text = "text_column_name" in flags and suffix not in TEXT_FILES
    wants_tokens = "tokens_column_name" in flags and kind is not None and suffix != ".tsv"
    wants_label = "text_column_names" in flags and not run.value("label_column_names")
    if not path.is_file() or kind is None or not (wants_text or wants_tokens or wants_label):
        return
    rows, where = _head(run, path, kind), "the training data"
    if not rows:
        return
    if wants_label:
        given = run[DataArguments]
        find_columns(rows, given.text_column_names, given.label_column_name, where)
    elif wants_tokens:
        find_token_columns(list(rows[0]), run[TokenDataArguments], f"--train_file {run.value('train_file')}", True)
    else:
        find_document_columns(list(rows[0]), rows, run[CorpusArguments].text_column_name, where)


def _head(run: Any, path: Path, kind: str) -> Rows:
    """The first rows, all with the same columns; none where they cannot be read."""
    name = run.value("train_file")
    open_plain(path, name=f"--train_file {name}").close()
    try:
        if kind == "parquet":
            return _of_parquet(path)
        text = as_utf8("train_file", name, run.value("encoding"), streaming=True)
        return (_of_json if kind == "json" else _of_csv)(text)
    except (RequestError, ValueError, TypeError, LookupError, RecursionError, OSError, csv.Error):
        return []


def _of_parquet(path: Path) -> Rows:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        first = next(file.iter_batches(HEAD_ROWS), None)
        return [] if first is None else list(first.to_pylist())


def _of_json(path: Path) -> Rows:
    """Of a line each."""
    with path.open(encoding=UTF8) as file:
        lines = file.read(HEAD_CHARACTERS).split("\n")
        is_whole = not file.read(1)
    rows = [json.loads(line) for line in (lines if is_whole else lines[:-1]) if line.strip()]
    columns: dict[str, None] = {name: None for row in rows for name in row}
    return [{name: row.get(name) for name in columns} for row in rows[:HEAD_ROWS]]


def _of_csv(path: Path) -> Rows:
    options = csv_options(str(path), path, None)
    with path.open(encoding=UTF8, newline="") as file:
        reader = csv.reader(file, delimiter=options["sep"], quoting=options["quoting"])
        found = (row for row in reader if row)
        next(found if options["header"] == 0 else iter(()), None)
        return [dict(zip(options["names"], row, strict=True)) for row in islice(found, HEAD_ROWS)]
