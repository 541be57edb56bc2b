"""The share of texts that match the reference exactly, apart from leading and trailing whitespace."""

from __future__ import annotations

from typing import Any

import evaluate

from finetune.metrics import info


class ExactMatch(evaluate.Metric):
    """`exact_match`, between 0 and 1."""

    def _info(self) -> Any:
        return info(self, "string")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        alike = [one.strip() == other.strip() for one, other in zip(predictions, references, strict=True)]
        return {"exact_match": sum(alike) / len(alike)}
