"""The flags of recipes/seq_cls.py and similar recipes: model and texts."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import AT_LEAST_ONE, FILE, METRIC, NAME_OR_PATH, PART, RATE, TIMEOUT, Range, flag
from finetune.run.on_resume import EVALUATED, GOES_ON, MODEL, ROWS, VALUES
from finetune.run.sizes import DISTILBERT_SIZES

LEAST_TOKENS = 8  # less leaves no room for text
CONLL = (".conll", ".conllu", ".bio", ".iob", ".iob2")  # suffixes of files of words and their tags
TASKS = ("classification", "multi_label_classification", "regression")


@dataclass
class NamedModelArguments:
    """Which model with a tokenizer."""

    model_name_or_path: str | None = flag(None, "hub id or folder of the model to start from", MODEL, path=NAME_OR_PATH)
    model_revision: str = flag("main", "branch, tag or commit on the hub", MODEL)
    tokenizer_name: str | None = flag(
        None, "hub id or folder of a tokenizer; default: the model's", MODEL, path=NAME_OR_PATH
    )
    trust_remote_code: bool = flag(False, "run Python code that comes with the model", GOES_ON)


@dataclass
class ModelArguments(NamedModelArguments):
    """Which model. Without a name, a DistilBERT of `model_size` is trained from scratch."""

    model_size: str = flag(
        "tiny", f"size of a model from scratch: {', '.join(DISTILBERT_SIZES)}", MODEL, choices=tuple(DISTILBERT_SIZES)
    )
    dropout: float | None = flag(None, "dropout of a model from scratch; default: 0.1", MODEL, range=RATE)


@dataclass
class HeldOutArguments:
    """Where data comes from, besides the files to train on."""

    dataset_name: str | None = flag(
        None, "data set on the hub, or a local folder in its layout", ROWS, path=NAME_OR_PATH
    )
    dataset_config_name: str | None = flag(None, "configuration of the hub data set", ROWS)
    validation_file: str | None = flag(
        None, "held-out file in the same format; default: a part of the training data", EVALUATED, path=FILE
    )
    encoding: str | None = flag(
        None, "encoding of csv, json and text files, such as cp1252 or utf-16; default: detected", ROWS
    )


@dataclass
class FileArguments(HeldOutArguments):
    """Where the data comes from."""

    train_file: str | None = flag(None, "csv, tsv, json(l) or parquet file; for tags also CoNLL", ROWS, path=FILE)
    test_file: str | None = flag(None, "file to predict, in the same format; it needs no labels", GOES_ON, path=FILE)


@dataclass
class SequenceArguments(FileArguments):
    """Where the data comes from, and how much of a row is read."""

    max_seq_length: int | None = flag(
        None,
        "longer texts are cut to this many tokens; default: what the model takes, at most 512",
        ROWS,
        range=Range(least=LEAST_TOKENS),
    )


@dataclass
class DataArguments(SequenceArguments):
    """What to train on. Without these, the built-in docstrings are used."""

    text_column_names: list[str] | None = flag(
        None, "column of the text, or two for pairs; default: found by name", ROWS
    )
    label_column_name: str | None = flag(None, "column of the label; default: found by its name", ROWS)
    label_column_names: list[str] | None = flag(
        None, "for several labels per row: one column of 0 and 1 for each label", ROWS
    )
    task: str | None = flag(None, f"{', '.join(TASKS)}; default: by the labels", ROWS, choices=TASKS)
    clean_line_breaks: bool = flag(False, "turn each <br /> in the texts into a line break", ROWS)
    streaming: bool = flag(False, "read and tokenize while training, without a cache", ROWS)


@dataclass
class TokenDataArguments(SequenceArguments):
    """What to train on. Without these, names in Python's standard library are used. Files that are not json(l), parquet
    or csv are CoNLL text: a word and its tag on each line, and a blank line after each sentence."""

    tokens_column_name: str | None = flag(None, "column of the lists of words; default: tokens or words", ROWS)
    tags_column_name: str | None = flag(None, "column of the lists of tags; default: tags or ner_tags", ROWS)
    tag_names: list[str] | None = flag(
        None, "names of tags that are whole numbers, in their order from 0, e.g. O B-PER I-PER", ROWS
    )


@dataclass
class PreparationArguments:
    """How the data is cut, cleaned and cached."""

    validation_fraction: float = flag(
        0.1, "fraction of the training data to hold out, if no held-out data is given", ROWS, range=PART
    )
    max_train_samples: int | None = flag(
        None, "train on a random sample of this many rows; for a stream, on the first ones", ROWS, range=AT_LEAST_ONE
    )
    max_eval_samples: int | None = flag(None, "the same for the held-out data", EVALUATED, range=AT_LEAST_ONE)
    max_predict_samples: int | None = flag(
        None, "predict only this many test rows, from the start", GOES_ON, range=AT_LEAST_ONE
    )
    skip_bad_rows: bool = flag(
        False, "leave out rows with an empty text or label, and images that cannot be read", ROWS
    )
    preprocessing_num_workers: int | None = flag(
        None, "number of processes that tokenize, or threads that read images", GOES_ON, range=AT_LEAST_ONE
    )
    data_timeout_seconds: float = flag(
        7200.0, "how long ranks wait for the one that prepares the data", GOES_ON, range=TIMEOUT
    )


@dataclass
class ClassArguments:
    """How classes are weighted, and what is measured."""

    class_weights: str = flag(
        "none", "balanced: weight classes so that all count equally in the loss", VALUES, choices=("none", "balanced")
    )
    metrics: list[str] | None = flag(
        None,
        "names in finetune/metrics/, or files with an evaluate.Metric; default: the task's. Lower is better "
        "for metrics that end in loss or error, or whose class has greater_is_better = False",
        GOES_ON,
        path=METRIC,
    )
