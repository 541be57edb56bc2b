"""Precision, recall and F1 of entities, found as a whole, and the accuracy of tags: what CoNLL's script counts."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from seqeval.metrics.sequence_labeling import accuracy_score, precision_recall_fscore_support


class EntityF1(evaluate.Metric):
    """`precision`, `recall` and `f1` of entities, over all types together, and `accuracy` of tags."""

    def _info(self) -> Any:
        tags = datasets.Sequence(datasets.Value("string"))
        return evaluate.MetricInfo(
            description="An entity is right where its first word, its last and its type are.",
            citation="H. Nakayama, seqeval: a Python framework for sequence labeling evaluation, 2018",
            inputs_description="predictions, references: for each sentence the list of its tags, such as B-person.",
            features=datasets.Features({"predictions": tags, "references": tags}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        precision, recall, f1, _ = precision_recall_fscore_support(
            references, predictions, average="micro", zero_division=0
        )
        accuracy = accuracy_score(references, predictions)
        return {"precision": float(precision), "recall": float(recall), "f1": float(f1), "accuracy": float(accuracy)}
