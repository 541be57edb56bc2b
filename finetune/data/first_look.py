"""Columns of a file, looked at before minutes go into compiling what would then read the wrong ones."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from finetune.data.columns import find_columns
from finetune.data.documents import TEXT_FILES, find_document_columns
from finetune.data.files import open_file
from finetune.data.tables import HEAD_ROWS
from finetune.data.token_labels import PARSED, find_token_columns
from finetune.run.flags.language import CorpusArguments
from finetune.run.flags.text import DataArguments, TokenDataArguments


def look_at_columns(run: Any) -> None:
    """Raises RequestError as the preparation of the data would, by the first rows of --train_file."""
    name, flags = run.value("train_file"), run.recipe.flags
    suffix = Path(name or "").suffix.lower()
    if not name:
        return

    def head() -> list[dict[str, Any]]:
        rows = open_file("train_file", name, streaming=True, encoding=run.value("encoding"))
        return list(islice(rows, HEAD_ROWS))

    where = "the training data"
    if "text_column_names" in flags and not run.value("label_column_names"):
        given = run[DataArguments]
        find_columns(head(), given.text_column_names, given.label_column_name, where)
    elif "tokens_column_name" in flags and suffix in PARSED:
        find_token_columns(Dataset.from_list(head()), run[TokenDataArguments], f"--train_file {name}", True)
    elif "text_column_name" in flags and suffix not in TEXT_FILES:
        find_document_columns(Dataset.from_list(head()), run[CorpusArguments].text_column_name, where)
