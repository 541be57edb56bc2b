"""What text is classified, by which model: the flags of recipes/seq_cls.py and its like."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.run.flag import FILE, METRIC, NAME_OR_PATH
from finetune.run.range import AT_LEAST_ONE, PART, RATE, TIMEOUT, Range
from finetune.run.sizes import DISTILBERT_SIZES

LEAST_TOKENS = 8  # less leaves no room for text
ENCODING = "of csv, json and text files, such as cp1252 or utf-16; default: found by their bytes"
CONLL = (".conll", ".conllu", ".bio", ".iob", ".iob2")  # what files of words and their tags are called
TASKS = ("classification", "multi_label_classification", "regression")


@dataclass
class ModelArguments:
    """Which model. Without a name, a DistilBERT of `model_size` is trained from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "hub id or folder of any classifier", "path": NAME_OR_PATH}
    )
    model_revision: str = field(default="main", metadata={"help": "branch, tag or commit on the hub"})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "hub id or folder; default: the model's", "path": NAME_OR_PATH}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "run Python code that comes with the model"})
    model_size: str = field(
        default="tiny",
        metadata={"help": f"from scratch: {', '.join(DISTILBERT_SIZES)}", "choices": tuple(DISTILBERT_SIZES)},
    )
    dropout: float | None = field(
        default=None, metadata={"help": "from scratch: in embeddings and layers; default 0.1", "range": RATE}
    )


@dataclass
class FileArguments:
    """Where data comes from, and how much of a row is read."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "hub data set, or a local folder in its layout", "path": NAME_OR_PATH}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "configuration of the hub data set"})
    train_file: str | None = field(
        default=None, metadata={"help": "csv, tsv, json(l) or parquet; of tags CoNLL", "path": FILE}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "likewise; default: a part of train", "path": FILE}
    )
    test_file: str | None = field(default=None, metadata={"help": "likewise; labels are not needed", "path": FILE})
    encoding: str | None = field(default=None, metadata={"help": ENCODING})
    max_seq_length: int | None = field(
        default=None,
        metadata={
            "help": "tokens; default: the model's, at most 512; from scratch any",
            "range": Range(least=LEAST_TOKENS),
        },
    )


@dataclass
class DataArguments(FileArguments):
    """What to train on. With none of these, the built-in docstrings are used."""

    text_column_names: list[str] | None = field(default=None, metadata={"help": "one column, or two for pairs"})
    label_column_name: str | None = field(default=None, metadata={"help": "default: found by its name"})
    label_column_names: list[str] | None = field(
        default=None, metadata={"help": "several labels a row: a column of 0 and 1 for each"}
    )
    task: str | None = field(
        default=None, metadata={"help": f"{', '.join(TASKS)}; default: by the labels", "choices": TASKS}
    )
    clean_line_breaks: bool = field(
        default=False, metadata={"help": "make a line break of each <br /> in the texts, as in reviews from web pages"}
    )
    streaming: bool = field(default=False, metadata={"help": "read and tokenize on the way to the model"})


@dataclass
class TokenDataArguments(FileArguments):
    """What to train on. With none of these, names in Python's standard library are used. Files that are not json(l),
    parquet or csv are CoNLL text: a word and its tag a line, a blank line after each sentence."""

    tokens_column_name: str | None = field(default=None, metadata={"help": "lists of words; default: tokens or words"})
    tags_column_name: str | None = field(default=None, metadata={"help": "lists of tags; default: tags or ner_tags"})


@dataclass
class PreparationArguments:
    """How the data is cut, cleaned and cached."""

    validation_fraction: float = field(
        default=0.1, metadata={"help": "part of train to hold out, without a split", "range": PART}
    )
    max_train_samples: int | None = field(
        default=None,
        metadata={"help": "a seeded random choice of this many; of a stream, the first", "range": AT_LEAST_ONE},
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "likewise for validation", "range": AT_LEAST_ONE}
    )
    max_predict_samples: int | None = field(
        default=None, metadata={"help": "the first so many of the test rows", "range": AT_LEAST_ONE}
    )
    skip_bad_rows: bool = field(
        default=False, metadata={"help": "leave out rows with empty text or label, and pictures that cannot be read"}
    )
    preprocessing_num_workers: int | None = field(
        default=None,
        metadata={"help": "processes that tokenize, threads that read pictures", "range": AT_LEAST_ONE},
    )
    data_timeout_seconds: float = field(
        default=7200.0, metadata={"help": "how long to wait for the rank that prepares", "range": TIMEOUT}
    )


@dataclass
class ClassArguments:
    """How classes count, and what is measured."""

    class_weights: str = field(
        default="none",
        metadata={"help": "'balanced': every class counts alike in the loss", "choices": ("none", "balanced")},
    )
    metrics: list[str] | None = field(
        default=None,
        metadata={
            "help": "names in finetune/metrics/, or files with an evaluate.Metric; default: the task's. The best model "
            "has less of a figure that ends in loss or error, or whose class says greater_is_better = False",
            "path": METRIC,
        },
    )
