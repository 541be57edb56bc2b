"""Sequence classifiers: any pretrained one, or a DistilBERT from scratch at a size that suits the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
)

from finetune.data.columns import MULTI_LABEL, TOKENS, Labels
from finetune.data.tokenizer import pad_with_end, refuse_more_tokens
from finetune.errors import RequestError
from finetune.models.adapters import heads_of
from finetune.models.source import IN_FP32, Kept, TextSource, find_text_source, load_weights, positions_of, with_labels
from finetune.run.decoders import ENCODERS
from finetune.run.facts import NO_LIMIT, tokens_of
from finetune.run.files import SETTLED, TEXT_COLUMNS
from finetune.run.flags.text import ModelArguments
from finetune.run.sizes import DISTILBERT_POSITIONS, DISTILBERT_SIZES, distilbert_shape


@dataclass(frozen=True, kw_only=True)
class Source(TextSource):
    """Without `pretrained`, `config` is None. `max_seq_length` is in tokens, `vocab_size` that of a new tokenizer."""

    max_seq_length: int
    vocab_size: int

    @property
    def labels(self) -> Labels | None:
        """A trained model's classes, in the order of their ids; None if its config has none."""
        return trained_labels(self.config)


def trained_labels(config: Any | None) -> Labels | None:
    """The classes of a model's config; None without a config, or if it names none."""
    problem, texts = getattr(config, "problem_type", None), getattr(config, TEXT_COLUMNS, None)
    columns = tuple(map(str, texts)) if isinstance(texts, list) else ()
    if problem == "regression":
        return Labels("regression", (), columns)
    task = MULTI_LABEL if problem == MULTI_LABEL else "classification"
    if any(name.endswith("ForTokenClassification") for name in getattr(config, "architectures", None) or ()):
        task = TOKENS
    names = dict(getattr(config, "id2label", None) or {})
    ordered = tuple(str(names[i]) for i in sorted(names))
    return None if not ordered or ordered[0] == "LABEL_0" else Labels(task, ordered, columns)


def find_source(arguments: ModelArguments, max_seq_length: int | None) -> Source:
    """Load the model's config and tokenizer, not its weights. Raises RequestError if either cannot be loaded."""
    scratch = TextSource(config=None, description=f"DistilBERT from scratch, size {arguments.model_size}")
    found = find_text_source(arguments, scratch, fast=True)
    config, tokenizer = with_labels(found.config, found.adapter), found.tokenizer
    if tokenizer is not None:
        pad_with_end(tokenizer)
    positions = max(DISTILBERT_POSITIONS, max_seq_length or 0) if config is None else positions_of(config)
    most = getattr(tokenizer, "model_max_length", NO_LIMIT)
    length = tokens_of("max_seq_length", max_seq_length, positions, most)
    return Source(**vars(found), max_seq_length=length, vocab_size=DISTILBERT_SIZES[arguments.model_size].vocab_size)


def build_classifier(
    arguments: ModelArguments,
    source: Source,
    labels: Labels,
    tokenizer: Any,
    will_train: bool = True,
    kept: Kept = IN_FP32,
) -> Any:
    """The model, with the label names in its config. Call it after `TrainingArguments`, so that ZeRO-3 shards it.

    Raises RequestError if it is only evaluated and was not trained on these labels.
    """
    if not will_train:
        _check_knows(source, labels)
    label_config: dict[str, Any] = {
        "num_labels": len(labels.names) or 1,
        "problem_type": {"classification": "single_label_classification", TOKENS: None}.get(labels.task, labels.task),
    }
    of_tokens = labels.task == TOKENS
    if labels.names:
        label_config["id2label"] = dict(enumerate(labels.names))
        label_config["label2id"] = {name: i for i, name in enumerate(labels.names)}
    if source.config is None:
        # Not `from_config`: under ZeRO-3 it initializes weights in another order, so the run would start elsewhere.
        kind = DistilBertForTokenClassification if of_tokens else DistilBertForSequenceClassification
        return kind(scratch_config(arguments, source, tokenizer, label_config))
    config = source.config
    for name in SETTLED if will_train else ():
        if hasattr(config, name):
            delattr(config, name)  # of the old weights and their data
    for key, value in label_config.items():
        setattr(config, key, value)
    fit_to(tokenizer, config)
    kind = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    if kept.in_4bit:
        with torch.device("meta"):
            kept = replace(kept, whole=tuple(heads_of(kind.from_config(config))))
    # A head with another number of labels is replaced by a new one; an adapter brings its own.
    makes_head = will_train or source.adapter is not None
    return load_weights(kind, str(source.pretrained), config, arguments, kept, has_new_head=makes_head)


def _check_knows(source: Source, labels: Labels) -> None:
    """For a model that is only evaluated."""
    if source.config is None or source.config.num_labels != (len(labels.names) or 1):
        has = "is not given" if source.config is None else f"has {source.config.num_labels} outputs"
        raise RequestError(
            f"--do_train False evaluates a trained model, but --model_name_or_path {has}, and the data has "
            f"{len(labels.names) or 'no'} classes. Give a model that was trained on such data, or give the data that "
            "it was trained for in --validation_file or --test_file (the default data is the built-in docstrings)."
        )
    known = source.labels.names if source.labels else ()
    if known and labels.names and labels.names != known:
        raise RequestError(
            f"--do_train False: the model knows the classes {', '.join(known[:10])}, but the data has "
            f"{', '.join(labels.names[:10])}. Name the data's labels as the model does."
        )


def fit_to(tokenizer: Any, config: Any) -> None:
    """Set the padding token. Raises RequestError if the model embeds fewer tokens than the tokenizer has."""
    text = config.get_text_config()
    is_decoder = not config.is_encoder_decoder and text.model_type not in ENCODERS
    # A decoder classifies a text at its last token that is none of the config's padding. Other models may count
    # positions from theirs, as RoBERTa does.
    if is_decoder or getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = tokenizer.pad_token_id
    refuse_more_tokens(tokenizer, text.vocab_size)


def scratch_config(
    arguments: ModelArguments, source: Source, tokenizer: Any, label_config: dict[str, Any]
) -> DistilBertConfig:
    """The config of the DistilBERT of --model_size."""
    return DistilBertConfig(
        **distilbert_shape(arguments.model_size, arguments.dropout, source.max_seq_length),
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **label_config,
    )
