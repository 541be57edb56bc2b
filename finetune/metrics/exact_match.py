"""The share of texts that match the reference exactly, apart from leading and trailing whitespace."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate


class ExactMatch(evaluate.Metric):
    """`exact_match`, between 0 and 1."""

    def _info(self) -> Any:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="The share of predicted texts that equal the references.",
            citation="",
            inputs_description="predictions, references: texts.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        alike = [one.strip() == other.strip() for one, other in zip(predictions, references, strict=True)]
        return {"exact_match": sum(alike) / len(alike)}
