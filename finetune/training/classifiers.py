"""What the recipes of text classifiers share: the model with its loss, as the flags ask."""

from __future__ import annotations

from typing import Any

from finetune.data.classification import ClassificationData
from finetune.data.columns import MULTI_LABEL, TOKENS
from finetune.models.classifier import Source, build_classifier
from finetune.run.flags.text import ClassArguments, ModelArguments
from finetune.training.loss import loss_for, settle_loss_scaling
from finetune.training.start import Session


def text_classifier(session: Session, source: Source, data: ClassificationData) -> tuple[Any, Any]:
    """The model, and the loss in place of its own, None for its own. Raises RequestError."""
    training, labels = session.training, data.labels
    model = build_classifier(session[ModelArguments], source, labels, data.tokenizer, will_train=training.do_train)
    is_float = labels.task in ("regression", MULTI_LABEL)
    settle_loss_scaling(model, label_is_float=is_float, label_per_token=labels.task == TOKENS)
    counts = [data.account.label_counts.get(name, 0) for name in labels.names]
    weights = session[ClassArguments].class_weights if training.do_train else "none"
    rows = data.account.rows.get("train", 0)
    return model, loss_for(weights, training.label_smoothing_factor, labels.task, counts, rows)
