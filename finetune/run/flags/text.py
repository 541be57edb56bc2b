"""What text is classified, by which model: the flags of recipes/seq_cls.py and its like."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import FILE, METRIC, NAME_OR_PATH, flag
from finetune.run.on_resume import EVALUATED, GOES_ON, MODEL, ROWS, VALUES
from finetune.run.range import AT_LEAST_ONE, PART, RATE, TIMEOUT, Range
from finetune.run.sizes import DISTILBERT_SIZES

LEAST_TOKENS = 8  # less leaves no room for text
ENCODING = "of csv, json and text files, such as cp1252 or utf-16; default: found by their bytes"
CONLL = (".conll", ".conllu", ".bio", ".iob", ".iob2")  # what files of words and their tags are called
TASKS = ("classification", "multi_label_classification", "regression")


@dataclass
class ModelArguments:
    """Which model. Without a name, a DistilBERT of `model_size` is trained from scratch."""

    model_name_or_path: str | None = flag(None, "hub id or folder of any classifier", MODEL, path=NAME_OR_PATH)
    model_revision: str = flag("main", "branch, tag or commit on the hub", MODEL)
    tokenizer_name: str | None = flag(None, "hub id or folder; default: the model's", MODEL, path=NAME_OR_PATH)
    trust_remote_code: bool = flag(False, "run Python code that comes with the model", GOES_ON)
    model_size: str = flag(
        "tiny", f"from scratch: {', '.join(DISTILBERT_SIZES)}", MODEL, choices=tuple(DISTILBERT_SIZES)
    )
    dropout: float | None = flag(None, "from scratch: in embeddings and layers; default 0.1", MODEL, range=RATE)


@dataclass
class FileArguments:
    """Where data comes from, and how much of a row is read."""

    dataset_name: str | None = flag(None, "hub data set, or a local folder in its layout", ROWS, path=NAME_OR_PATH)
    dataset_config_name: str | None = flag(None, "configuration of the hub data set", ROWS)
    train_file: str | None = flag(None, "csv, tsv, json(l) or parquet; of tags CoNLL", ROWS, path=FILE)
    validation_file: str | None = flag(None, "likewise; default: a part of train", EVALUATED, path=FILE)
    test_file: str | None = flag(None, "likewise; labels are not needed", GOES_ON, path=FILE)
    encoding: str | None = flag(None, ENCODING, ROWS)
    max_seq_length: int | None = flag(
        None, "tokens; default: the model's, at most 512; from scratch any", ROWS, range=Range(least=LEAST_TOKENS)
    )


@dataclass
class DataArguments(FileArguments):
    """What to train on. With none of these, the built-in docstrings are used."""

    text_column_names: list[str] | None = flag(None, "one column, or two for pairs", ROWS)
    label_column_name: str | None = flag(None, "default: found by its name", ROWS)
    label_column_names: list[str] | None = flag(None, "several labels a row: a column of 0 and 1 for each", ROWS)
    task: str | None = flag(None, f"{', '.join(TASKS)}; default: by the labels", ROWS, choices=TASKS)
    clean_line_breaks: bool = flag(
        False, "make a line break of each <br /> in the texts, as in reviews from web pages", ROWS
    )
    streaming: bool = flag(False, "read and tokenize on the way to the model", ROWS)


@dataclass
class TokenDataArguments(FileArguments):
    """What to train on. With none of these, names in Python's standard library are used. Files that are not json(l),
    parquet or csv are CoNLL text: a word and its tag a line, a blank line after each sentence."""

    tokens_column_name: str | None = flag(None, "lists of words; default: tokens or words", ROWS)
    tags_column_name: str | None = flag(None, "lists of tags; default: tags or ner_tags", ROWS)


@dataclass
class PreparationArguments:
    """How the data is cut, cleaned and cached."""

    validation_fraction: float = flag(0.1, "part of train to hold out, without a split", ROWS, range=PART)
    max_train_samples: int | None = flag(
        None, "a seeded random choice of this many; of a stream, the first", ROWS, range=AT_LEAST_ONE
    )
    max_eval_samples: int | None = flag(None, "likewise for validation", EVALUATED, range=AT_LEAST_ONE)
    max_predict_samples: int | None = flag(None, "the first so many of the test rows", GOES_ON, range=AT_LEAST_ONE)
    skip_bad_rows: bool = flag(False, "leave out rows with empty text or label, and pictures that cannot be read", ROWS)
    preprocessing_num_workers: int | None = flag(
        None, "processes that tokenize, threads that read pictures", GOES_ON, range=AT_LEAST_ONE
    )
    data_timeout_seconds: float = flag(7200.0, "how long to wait for the rank that prepares", GOES_ON, range=TIMEOUT)


@dataclass
class ClassArguments:
    """How classes count, and what is measured."""

    class_weights: str = flag(
        "none", "'balanced': every class counts alike in the loss", VALUES, choices=("none", "balanced")
    )
    metrics: list[str] | None = flag(
        None,
        "names in finetune/metrics/, or files with an evaluate.Metric; default: the task's. The best model "
        "has less of a figure that ends in loss or error, or whose class says greater_is_better = False",
        GOES_ON,
        path=METRIC,
    )
