"""Text classification and regression: token ids, labels and a summary of what was found, prepared once and cached."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForTokenClassification, DataCollatorWithPadding

from finetune.data.cache import file_states, folder_for
from finetune.data.charset import encoding_notes
from finetune.data.columns import MULTI_LABEL, TOKENS, Columns, Labels, said_counts, said_data
from finetune.data.duplicates import inputs_of, notes_of_trained
from finetune.data.label_lists import MERGED
from finetune.data.streaming import StreamCollator, Survey, TextStream, held_out_rows, some_texts, survey
from finetune.data.tables import ROW, SPLITS, CleanTables, Table, clean_tables, load_tables
from finetune.data.tokenizer import Tokenized, cut_to, identity, prepare_tokens, train_wordpiece
from finetune.run.flags.text import PreparationArguments
from finetune.run.launch import Launch

FORMAT = 14  # raise it when what is cached changes


@dataclass(frozen=True)
class Account:
    """What was found, for the log and the model card. Row counts are taken after skipping and cutting."""

    source: str
    columns: Columns
    rows: dict[str, int]
    skipped: dict[str, int]
    truncated: dict[str, int]
    label_counts: dict[str, int]  # of the training rows; empty for regression
    max_seq_length: int
    stream: Survey | None = None  # if the training rows are streamed
    notes: tuple[str, ...] = ()  # remarks about how the data was read
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # by split, the sums of the columns `Kind.counted`


@dataclass(frozen=True)
class ClassificationData(Tokenized):
    """Tokenized splits (`train`, `validation`, and `test` if given) with labels, account and tokenizer."""

    splits: dict[str, Any]
    labels: Labels
    account: Account
    tokenizer: Any

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        account, names = self.account, self.labels.names
        kind = f"{len(names)} {'tags' if self.labels.task == TOKENS else 'labels'}" if names else "regression"
        kind += f": {said_counts(account.label_counts)}" if account.label_counts else ""
        kind += ", any number of them per row" if self.labels.task == MULTI_LABEL else ""
        truncated = sum(account.truncated.values())
        cut = f"{truncated:,} rows cut to {account.max_seq_length} tokens" if truncated else ""
        return said_data(account, self.columns, f"rows, {kind}", cut)

    @property
    def columns(self) -> str:
        """Which columns are read, and which are ignored; empty for the built-in data."""
        columns = self.account.columns
        if self.account.source.startswith("built-in"):
            return ""
        return columns.describe(self.labels.names if columns.label == MERGED else ())

    @property
    def lengths(self) -> Any | None:
        """Length in tokens of each training sample; None for a stream or without training data."""
        return None if self.account.stream or "train" not in self.splits else self.splits["train"]["length"]

    @property
    def collator(self) -> Any:
        """Pads a batch to its longest row; also tokenizes the rows of a stream."""
        if self.account.stream:
            return StreamCollator(self.tokenizer, self.account.max_seq_length)
        if self.labels.task == TOKENS:
            return DataCollatorForTokenClassification(self.tokenizer)
        return DataCollatorWithPadding(self.tokenizer)


Data = TypeVar("Data", bound=ClassificationData)
Rows: TypeAlias = dict[str, list[Any]]  # a batch, by column


@dataclass(frozen=True)
class Kind(Generic[Data]):
    """How one kind of text data gets from its files to the cache. `name` is its cache folder; `kept` lists the columns
    that tokenizing leaves unchanged, and `counted` those that it makes only for their sums, on which `remarks` are
    made; `inputs` names the columns of the clean tables by which rows with the same inputs are found."""

    name: str
    read: Callable[[Any], tuple[Table, str]]
    clean: Callable[..., CleanTables]
    encode: Callable[[Any, Columns, int, Rows], dict[str, list[Any]]]  # by tokenizer, to at most so many tokens
    texts: Callable[[CleanTables], Iterator[str]]
    data: Callable[..., Data]
    count: Callable[[Table, Labels], dict[str, int]] = lambda tables, labels: {}
    kept: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    remarks: Callable[[Account], list[str]] = lambda account: []
    train: Callable[[Iterator[str], int, int], Any] = train_wordpiece  # used when no tokenizer is given
    inputs: Callable[[CleanTables], Sequence[str]] = lambda clean: clean.columns.text


def prepare(
    arguments: Any,
    preparation: PreparationArguments,
    tokenizer: Any | None,
    *,
    max_seq_length: int,
    vocab_size: int,
    seed: int,
    launch: Launch,
    kind: Kind[Data],
    trained: Labels | None = None,
    kept: Any | None = None,
) -> Data:
    """The data of one run, from the cache or made by the rank that leads its node. `max_seq_length` is in tokens.
    `arguments` match `kind`: DataArguments for TEXTS.

    Without `tokenizer`, a WordPiece of `vocab_size` is trained on the training text; a resumed run passes its
    checkpoint's tokenizer as `kept`. `trained` holds the labels of a trained model; its label ids are kept if it has
    the data's classes. Raises RequestError for bad data, and RunError if the preparing rank takes longer than
    --data_timeout_seconds.
    """
    job = _Preparation(kind, arguments, preparation, tokenizer, max_seq_length, vocab_size, seed, trained)
    job = prepare_tokens(job, kept, launch, preparation.data_timeout_seconds)
    data = load(job.folder, kind.data)
    if job.tokenizer is not None:
        data = replace(data, tokenizer=job.tokenizer)
    if data.account.stream is None:
        return data
    return replace(data, splits={"train": TextStream(arguments, data.account.stream, seed), **data.splits})


@dataclass(frozen=True)
class _Preparation:
    """Everything that determines the prepared data, and how to make it."""

    kind: Kind[Any]
    arguments: Any
    preparation: PreparationArguments
    tokenizer: Any | None
    max_seq_length: int
    vocab_size: int
    seed: int
    trained: Labels | None

    @cached_property
    def folder(self) -> Path:
        given = self.arguments
        files = file_states(given.dataset_name, given.train_file, given.validation_file, given.test_file)
        known = None if self.tokenizer is None else identity(self.tokenizer)
        sizes = [self.max_seq_length, self.vocab_size, self.seed]
        return folder_for(self.kind.name, FORMAT, files, given, self.preparation, known, sizes, self.trained)

    def make(self, folder: Path) -> None:
        """Read, clean, tokenize and save."""
        arguments, preparation, seed, kind = self.arguments, self.preparation, self.seed, self.kind
        tables, source = kind.read(arguments)
        found = None
        if kind is TEXTS and arguments.streaming:
            found = survey(arguments, preparation, "validation" in tables, seed, self.trained)
        if found and found.held_out:
            tables["validation"] = held_out_rows(arguments, found, seed)
        known = (found.columns, found.labels) if found else None
        clean = kind.clean(tables, arguments, preparation, seed, known, self.trained)
        tokenizer = self.tokenizer
        if tokenizer is None:
            texts = some_texts(arguments, found) if found else kind.texts(clean)
            tokenizer = kind.train(texts, self.vocab_size, self.max_seq_length)
        workers = preparation.preprocessing_num_workers or os.cpu_count()
        encode = partial(kind.encode, tokenizer, clean.columns, self.max_seq_length)
        tokenized, sums = tokenize_tables(clean.splits, encode, kind.kept, workers, kind.counted)
        truncated = {split: counts.pop("truncated") for split, counts in sums.items()}
        counts = found.label_counts if found else kind.count(tokenized, clean.labels)
        rows = {split: len(table) for split, table in tokenized.items()}
        skipped = clean.skipped
        if found:
            rows, skipped = {"train": found.rows, **rows}, {"train": found.skipped, **skipped}
        twice = notes_of_trained({split: inputs_of(table, kind.inputs(clean)) for split, table in clean.splits.items()})
        notes = (*encoding_notes(arguments, SPLITS), *(found.notes if found else ()), *clean.notes, *twice)
        account = Account(
            source, clean.columns, rows, skipped, truncated, counts, self.max_seq_length, found, notes, sums
        )
        account = replace(account, notes=(*notes, *kind.remarks(account)))
        save(folder, tokenized, clean.labels, account, tokenizer)


def _texts(clean: CleanTables) -> Iterator[str]:
    return (str(text) for name in clean.columns.text for text in clean.splits["train"][name])


def _label_counts(tables: Table, labels: Labels) -> dict[str, int]:
    if labels.task == "regression" or "train" not in tables:
        return {}
    ids = tables["train"]["labels"]
    if labels.task == MULTI_LABEL:
        return dict(zip(labels.names, np.sum(ids, axis=0, dtype=int).tolist(), strict=True))
    return dict(Counter(labels.names[i] for i in ids))


def tokenize_tables(
    tables: Table, encode: Any, kept: Sequence[str], workers: int | None, counted: Sequence[str] = ()
) -> tuple[Table, dict[str, dict[str, int]]]:
    """Columns `input_ids` (and `token_type_ids` if the model uses them), `labels` and `length` in tokens, and `kept`.

    Also returns, for each split, how many rows were cut to `max_seq_length` (`truncated`) and the sums of the columns
    `counted` that it has. Validation rows are sorted by length, because it saves padding and metrics do not depend on
    order.
    """
    tokenized: Table = {}
    sums: dict[str, dict[str, int]] = {}
    for split, table in tables.items():
        table = table.map(
            encode,
            batched=True,
            num_proc=workers if workers and len(table) > 1000 * workers else None,
            remove_columns=[name for name in table.column_names if name not in kept],
            desc=f"tokenizing {split}",
        )
        summed = [name for name in ("truncated", *counted) if name in table.column_names]
        sums[split] = {name: int(np.sum(table[name])) for name in summed}
        table = table.remove_columns(summed)
        if "label" in table.column_names:
            table = table.rename_column("label", "labels")
        if split == "validation":
            table = table.select(np.argsort(-np.asarray(table["length"]), kind="stable")).flatten_indices()
        tokenized[split] = table
    return tokenized, sums


def _encode(tokenizer: Any, columns: Columns, max_length: int, rows: Rows) -> dict[str, list[Any]]:
    texts = ([str(value) for value in rows[name]] for name in columns.text)
    encoded, cut = cut_to(tokenizer, max_length, **dict(zip(("text", "text_pair"), texts, strict=False)))
    return {**encoded, "length": [len(ids) for ids in encoded["input_ids"]], "truncated": cut}


TEXTS = Kind(
    "classification", load_tables, clean_tables, _encode, _texts, ClassificationData, _label_counts, ("label", ROW)
)


def save(folder: Path, splits: Table, labels: Labels, account: Account, tokenizer: Any) -> None:
    """Writes what `load` reads."""
    for split, table in splits.items():
        table.save_to_disk(str(folder / split))
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    (folder / "data.json").write_text(json.dumps({"labels": asdict(labels), "account": asdict(account)}, indent=1))


def load(folder: Path, data: Callable[..., Data]) -> Data:
    """Memory-maps the splits and restores the rest as `save` wrote them."""
    stored = json.loads((folder / "data.json").read_text())
    splits = {split: Dataset.load_from_disk(str(folder / split)) for split in SPLITS if (folder / split).is_dir()}
    labels = Labels(stored["labels"]["task"], tuple(stored["labels"]["names"]))
    found = stored["account"]
    columns = Columns(tuple(found["columns"]["text"]), found["columns"]["label"], tuple(found["columns"]["others"]))
    stream = Survey(**{**found["stream"], "columns": columns, "labels": labels}) if found["stream"] else None
    account = Account(**{**found, "columns": columns, "stream": stream, "notes": tuple(found["notes"])})
    return data(splits, labels, account, AutoTokenizer.from_pretrained(str(folder / "tokenizer")))
