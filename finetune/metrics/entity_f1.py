"""Precision, recall and F1 of whole entities, and the accuracy of tags, as CoNLL's script computes them."""

from __future__ import annotations

from typing import Any

import evaluate
from seqeval.metrics.sequence_labeling import accuracy_score, precision_recall_fscore_support

from finetune.metrics import info


class EntityF1(evaluate.Metric):
    """`precision`, `recall` and `f1` of entities, over all types together, and `accuracy` of tags. H. Nakayama,
    seqeval: a Python framework for sequence labeling evaluation, 2018."""

    def _info(self) -> Any:
        return info(self, ["string"])

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        precision, recall, f1, _ = precision_recall_fscore_support(
            references, predictions, average="micro", zero_division=0
        )
        accuracy = accuracy_score(references, predictions)
        return {"precision": float(precision), "recall": float(recall), "f1": float(f1), "accuracy": float(accuracy)}
