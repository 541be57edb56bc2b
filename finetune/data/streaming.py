"""Training data that is never entirely in memory or on disk: read, cleaned and tokenized on the fly."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import DataCollatorWithPadding

from finetune.data.changes import UnchangedFiles, unchanged_rows
from finetune.data.columns import (
    HIDDEN_LABEL,
    MULTI_LABEL,
    Columns,
    Labels,
    by_text,
    find_labels,
    is_empty,
    names_of_ids,
    note_of_numbers,
    without_html_breaks,
)
from finetune.data.files import open_file, open_hub, readable
from finetune.data.find_columns import HEAD_ROWS, find_columns
from finetune.data.list_text import are_lists
from finetune.data.odd_labels import countable, missing_words, notes_of_names, refuse_nested, said_missing
from finetune.data.tables import ROW
from finetune.errors import RequestError, RunError
from finetune.run.flags.text import DataArguments, PreparationArguments

SHUFFLE_BUFFER_ROWS = 10_000
HELD_OUT_ROWS = 1_000  # at most, without a validation split and --max_eval_samples
TOKENIZER_ROWS = 100_000  # enough text to train a vocabulary on


@dataclass(frozen=True)
class Survey:
    """The result of one pass over the stream.

    `rows` counts the rows left for training, `label_counts` their labels. Rows up to `last_held_out` (-1 for none) are
    held out for validation by a seeded hash of their number: the first rows of a sorted file may all be of one class.
    """

    columns: Columns
    labels: Labels
    label_counts: dict[str, int]
    rows: int
    skipped: int
    fraction: float
    held_out: int
    last_held_out: int
    notes: tuple[str, ...] = ()  # remarks about the labels


def open_stream(arguments: DataArguments, columns: Columns | None = None) -> IterableDataset:
    """The training rows in order, their texts cleaned if `columns` are given. Raises RequestError."""
    if arguments.dataset_name:
        stream = open_hub(arguments.dataset_name, arguments.dataset_config_name, "train", streaming=True)
    elif arguments.train_file:
        stream = open_file("train_file", arguments.train_file, streaming=True, encoding=arguments.encoding)
    else:
        raise RequestError("--streaming needs something to stream: give --train_file or --dataset_name.")
    if stream is None:
        raise RequestError(f"--dataset_name {arguments.dataset_name}: has no train split.")
    return without_html_breaks(stream, columns) if columns and arguments.clean_line_breaks else stream


def survey(
    arguments: DataArguments, preparation: PreparationArguments, has_validation: bool, seed: int, trained: Labels | None
) -> Survey:
    """Reads the stream once for columns, labels, bad rows and the number of rows. Keeps no text."""
    stream = open_stream(arguments)
    head = list(islice(stream, HEAD_ROWS))
    columns = find_columns(head, arguments.text_column_names, arguments.label_column_name, "the training data")
    cells = [row[str(columns.label)] for row in head]
    has_several = isinstance(cells[0], list) or are_lists(cells)
    if arguments.label_column_names or arguments.task == MULTI_LABEL or has_several:
        raise RequestError("--streaming: does not support several labels per row. Leave it out.")
    fraction = 0.0 if has_validation else preparation.validation_fraction
    most_held_out = preparation.max_eval_samples or HELD_OUT_ROWS
    most = preparation.max_train_samples or sys.maxsize
    names = class_names_of(stream, columns)
    everything, kept = Counter[Any](), Counter[Any]()
    rows, held_out, last, bad = 0, 0, -1, 0
    for number, row in enumerate(readable(open_stream(arguments, columns), RequestError)):
        if _is_bad(row, columns, names):
            bad += 1
            if not preparation.skip_bad_rows:
                fix = "Leave" if arguments.dataset_name else "Fix it, or leave"
                raise RequestError(
                    f"data row {number + 1} of the stream has an empty text, or an empty or hidden label. {fix} such "
                    "rows out with --skip_bad_rows True."
                )
            continue
        where = f"data row {number + 1} of the stream"
        named = names_of_ids([row[columns.label]], names, where) if names else None
        label = countable(named[0] if named else row[columns.label])
        refuse_nested([label], str(columns.label), where)
        everything[label] += 1
        if held_out < most_held_out and is_drawn(number, seed, fraction):
            held_out, last = held_out + 1, number
        elif rows < most:
            kept[label] += 1
            rows += 1
        elif not fraction or held_out >= most_held_out:
            break
    if not names and (words := missing_words(everything)) and not (trained and set(words) <= set(trained.ids)):
        raise RequestError(f"the stream has rows without a label.{said_missing(words)} Remove them from the file.")
    labels = find_labels(everything, arguments.task, names, "the training data", trained)
    counts = dict(by_text(kept)) if labels.task == "classification" else {}
    if not kept or (fraction and not held_out):
        raise RequestError(f"the stream has {rows + held_out} good rows: too few. Add rows, or --validation_file.")
    odd = [] if names else notes_of_names(labels.names, str(columns.label))
    notes = tuple(filter(None, [note_of_numbers(everything, labels, arguments.task), *odd]))
    return Survey(columns, labels, counts, rows, bad, fraction, held_out, last, notes)


def class_names_of(stream: IterableDataset, columns: Columns) -> list[str] | None:
    """The class names of a hub data set whose labels are ids; None if labels are names already."""
    return getattr(stream.features[columns.label], "names", None) if stream.features else None


def _is_bad(row: dict[str, Any], columns: Columns, names: list[str] | None) -> bool:
    """Whether a text or the label is missing; `names` are those of label ids, if labels are ids."""
    label = row[str(columns.label)]
    is_hidden = names is not None and label == HIDDEN_LABEL  # as where SNLI's annotators did not agree
    return is_hidden or any(map(is_empty, (label, *(row[name] for name in columns.text))))


def is_drawn(number: int, seed: int, fraction: float) -> bool:
    """Whether row `number` of a stream is held out, by a seeded hash that needs no pass over the rows."""
    return zlib.crc32(f"{seed} {number}".encode()) < fraction * 2**32


def _is_held_out(number: int, seed: int, found: Survey) -> bool:
    return number <= found.last_held_out and is_drawn(number, seed, found.fraction)


def held_out_rows(arguments: DataArguments, found: Survey, seed: int) -> Dataset:
    """The validation table, with the stream's own columns."""
    stream = open_stream(arguments, found.columns)
    columns, names = found.columns, class_names_of(stream, found.columns)
    rows = islice(stream, found.last_held_out + 1)
    drawn = [row for i, row in enumerate(rows) if _is_held_out(i, seed, found) and not _is_bad(row, columns, names)]
    return Dataset.from_list(drawn, features=stream.features)


def some_texts(arguments: DataArguments, found: Survey) -> Iterator[str]:
    """Yields enough text to train a vocabulary on."""
    for row in islice(open_stream(arguments, found.columns), TOKENIZER_ROWS):
        yield from (str(row[name]) for name in found.columns.text if row[name] is not None)


class TextStream(TorchIterableDataset):
    """Rows of `text` (a tuple of one or two strings) and `labels`, shuffled in a buffer by seed and epoch. Accelerate
    deals them out to the ranks; the collator tokenizes, so that no rank tokenizes rows that another trains on."""

    def __init__(self, arguments: DataArguments, found: Survey, seed: int) -> None:
        self.found = found
        self.files = UnchangedFiles([arguments.train_file])
        columns, stream = found.columns, open_stream(arguments, found.columns)
        names = class_names_of(stream, columns)

        def is_for_training(row: dict[str, Any], number: int) -> bool:
            return not _is_bad(row, columns, names) and not _is_held_out(number, seed, found)

        stream = stream.filter(is_for_training, with_indices=True)
        self.stream = stream.take(found.rows).shuffle(seed, buffer_size=SHUFFLE_BUFFER_ROWS)
        self.global_batch_size = 1

    def __len__(self) -> int:
        """Rows of an epoch. As in GlobalBatchSampler, the first rows fill up the last global batch, again and again if
        it has more than all of them."""
        return -(-self.found.rows // self.global_batch_size) * self.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate at the start of each epoch."""
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(len(self) // self.found.rows):  # whole passes, which look at the files at their ends, too
            yield from self._rows()
        yield from islice(self._rows(), len(self) % self.found.rows)

    def _rows(self) -> Iterator[dict[str, Any]]:
        columns, names = self.found.columns, class_names_of(self.stream, self.found.columns)
        read = 0
        for row in unchanged_rows(self.stream, self.files):
            read += 1
            value = row[columns.label]
            text = tuple(str(row[name]) for name in columns.text)
            yield {"text": text, "labels": self.found.labels.encode(names[value] if names else value)}
        if read < self.found.rows:
            raise RunError(
                f"the stream ended after {read:,} rows, but {self.found.rows:,} were counted before training. Is "
                "it truncated? Fix it, then start again with --resume allow."
            )


class StreamCollator(DataCollatorWithPadding):
    """Pads like its parent, and tokenizes rows that are still text."""

    def __init__(self, tokenizer: Any, max_seq_length: int) -> None:
        super().__init__(tokenizer)
        self.max_seq_length = max_seq_length

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        rows = []
        for row in features:
            row = {name: value for name, value in row.items() if name not in ("length", ROW)}
            if "text" in row:
                row |= self.tokenizer(*row.pop("text"), truncation=True, max_length=self.max_seq_length)
            rows.append(row)
        return dict(super().__call__(rows))
