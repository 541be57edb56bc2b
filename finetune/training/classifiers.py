"""What the text classification recipes share: building the model and its loss from the flags."""

from __future__ import annotations

from typing import Any

from finetune.data.classification import ClassificationData
from finetune.data.columns import MULTI_LABEL, TOKENS
from finetune.models.adapters import check_adapter, kept_as, with_adapter
from finetune.models.classifier import Source, build_classifier, find_source
from finetune.run.files import TEXT_COLUMNS
from finetune.run.flags.adapter import AdapterArguments
from finetune.run.flags.text import ClassArguments, ModelArguments
from finetune.training.loss import loss_for, settle_loss_scaling
from finetune.training.start import Session


def text_source(session: Session, max_seq_length: int | None) -> Source:
    """Find the model, without loading its weights. Raises RequestError for flags that do not fit it."""
    source = find_source(session[ModelArguments], max_seq_length)
    session.say(*check_adapter(session.run, source.adapter))
    return source


def text_classifier(session: Session, source: Source, data: ClassificationData) -> tuple[Any, Any]:
    """The model with its adapter, and the loss that replaces its own (None: keep its own). Raises RequestError."""
    training, labels = session.training, data.labels
    adapter = session[AdapterArguments]
    model = build_classifier(
        session[ModelArguments],
        source,
        labels,
        data.tokenizer,
        will_train=training.do_train,
        kept=kept_as(session.run, source.adapter, training.bf16),
    )
    if training.do_train and labels.task != TOKENS and not data.account.source.startswith("built-in"):
        setattr(model.config, TEXT_COLUMNS, list(data.account.columns.text))  # an evaluation reads the same ones
    is_float = labels.task in ("regression", MULTI_LABEL)
    settle_loss_scaling(model, label_is_float=is_float, label_per_token=labels.task == TOKENS)
    model = with_adapter(model, adapter, source.adapter, session.run.task.adapter)
    counts = [data.account.label_counts.get(name, 0) for name in labels.names]
    weights = session[ClassArguments].class_weights if training.do_train else "none"
    rows = data.account.rows.get("train", 0)
    return model, loss_for(weights, training.label_smoothing_factor, labels.task, counts, rows)
