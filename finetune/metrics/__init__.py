"""Metrics in the form of `evaluate`, one per file: `evaluate.load("finetune/metrics/f1.py")` opens one, also offline.

Recipes take them by name, and user-defined ones of the same form by path: `--metrics accuracy f1 my_metric.py`. A file
holds one subclass of `evaluate.Metric`, written as `evaluate.Metric` (`evaluate` would mistake an imported name for the
metric itself). Its `greater_is_better` says whether higher is better; the default is True.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate


def info(metric: evaluate.Metric, predictions: Any, references: Any = None) -> Any:
    """What `_info` returns: a description, which is the metric's docstring, and the kinds of its inputs: "string", or
    ["string"] for a list of strings. `references` are like predictions unless given."""
    kinds = {"predictions": predictions, "references": references or predictions}
    features = datasets.Features({name: _feature(kind) for name, kind in kinds.items()})
    return evaluate.MetricInfo(features=features, description=metric.__doc__ or "", citation="", inputs_description="")


def _feature(kind: Any) -> Any:
    return datasets.Sequence(_feature(kind[0])) if isinstance(kind, list) else datasets.Value(kind)
