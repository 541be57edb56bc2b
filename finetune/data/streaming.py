"""Training data that is never whole in memory or on disk: read, cleaned and tokenized on the way to the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import DataCollatorWithPadding

from finetune.data.columns import Columns, Labels, find_columns, find_labels, is_empty, label_text
from finetune.data.files import open_file, open_hub
from finetune.data.tables import HEAD_ROWS, DataArguments, PreparationArguments
from finetune.errors import RequestError

SHUFFLE_BUFFER_ROWS = 10_000
HELD_OUT_ROWS = 1_000  # from the stream's beginning, where there is no validation split and no --max_eval_samples
TOKENIZER_ROWS = 100_000  # enough text to train a vocabulary on


@dataclass(frozen=True)
class Survey:
    """What one pass over the stream found. `rows` are those left for training."""

    columns: Columns
    labels: Labels
    label_counts: dict[str, int]
    rows: int
    skipped: int
    held_out: int


def open_stream(arguments: DataArguments) -> IterableDataset:
    """The training rows as they come. Raises RequestError."""
    if arguments.dataset_name:
        stream = open_hub(arguments.dataset_name, arguments.dataset_config_name, "train", streaming=True)
    elif arguments.train_file:
        stream = open_file("train_file", arguments.train_file, streaming=True)
    else:
        raise RequestError("--streaming needs something to stream: give --train_file or --dataset_name.")
    if stream is None:
        raise RequestError(f"--dataset_name {arguments.dataset_name}: has no train split.")
    return stream


def survey(arguments: DataArguments, preparation: PreparationArguments, has_validation: bool) -> Survey:
    """Read the stream once: columns, labels, bad rows and how many rows there are. Nothing of the text is kept."""
    stream = open_stream(arguments)
    head = list(islice(stream, HEAD_ROWS))
    columns = find_columns(head, arguments.text_column_names, arguments.label_column_name, "the training data")
    held_out = 0 if has_validation else preparation.max_eval_samples or HELD_OUT_ROWS
    values: Counter[Any] = Counter()
    bad = good = 0
    for row in stream:
        if _is_bad(row, columns):
            bad += 1
            if not preparation.skip_bad_rows:
                raise RequestError(
                    f"data row {good + bad} of the stream has empty text or label. Mend it, or leave such rows out by "
                    "--skip_bad_rows True."
                )
        else:
            good += 1
            values[row[columns.label]] += 1
    rows = min(good - held_out, preparation.max_train_samples or good)
    if rows < 1:
        raise RequestError(f"the stream has {good} good rows, and {held_out} are held out: none is left to train on.")
    names = getattr(stream.features[columns.label], "names", None) if stream.features else None
    labels = find_labels(values, arguments.task, names, "the training data")
    counts: Counter[str] = Counter()
    if labels.task == "classification":
        for value, count in values.items():
            counts[names[value] if names else label_text(value)] += count
    return Survey(columns, labels, dict(counts), rows, bad, held_out)


def held_out_rows(arguments: DataArguments, found: Survey) -> Dataset:
    """The stream's first good rows, as a validation table with the stream's own columns."""
    stream = open_stream(arguments)
    kept = stream.filter(lambda row: not _is_bad(row, found.columns)).take(found.held_out)
    return Dataset.from_list(list(kept), features=stream.features)


def some_texts(arguments: DataArguments, found: Survey) -> Iterator[str]:
    """Text enough to train a vocabulary on."""
    for row in islice(open_stream(arguments), TOKENIZER_ROWS):
        yield from (str(row[name]) for name in found.columns.text if row[name] is not None)


def _is_bad(row: dict[str, Any], columns: Columns) -> bool:
    return any(is_empty(row[name]) for name in (*columns.text, columns.label))


class TextStream(TorchIterableDataset):
    """Rows of `text` (a tuple of one or two strings) and `labels`, shuffled in a buffer, in an order that the seed and
    the epoch decide. Accelerate deals them out to the ranks; tokenizing is left to the collator, so that no rank
    tokenizes what another will train on."""

    def __init__(self, arguments: DataArguments, found: Survey, seed: int) -> None:
        self.found = found
        columns = found.columns
        stream = open_stream(arguments).filter(lambda row: not _is_bad(row, columns))
        self.stream = stream.skip(found.held_out).take(found.rows).shuffle(seed, buffer_size=SHUFFLE_BUFFER_ROWS)

    def __len__(self) -> int:
        return self.found.rows

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate at the start of each epoch."""
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        columns, names = self.found.columns, self.class_names
        for row in self.stream:
            value = row[columns.label]
            text = tuple(str(row[name]) for name in columns.text)
            yield {"text": text, "labels": value if names else self.found.labels.encode(value)}

    @property
    def class_names(self) -> bool:
        """True where the stream's labels are ids already (a hub data set with named classes)."""
        features = self.stream.features
        return bool(features and hasattr(features[self.found.columns.label], "names"))


class StreamCollator(DataCollatorWithPadding):
    """Pads as its parent does, and tokenizes rows that come as text."""

    def __init__(self, tokenizer: Any, max_seq_length: int) -> None:
        super().__init__(tokenizer)
        self.max_seq_length = max_seq_length

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        rows = []
        for row in features:
            row = {name: value for name, value in row.items() if name != "length"}
            if "text" in row:
                row |= self.tokenizer(*row.pop("text"), truncation=True, max_length=self.max_seq_length)
            rows.append(row)
        return dict(super().__call__(rows))
