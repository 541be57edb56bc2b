"""Metrics in the form of `evaluate`, one per file: `evaluate.load("finetune/metrics/f1.py")` opens one, also offline.

Recipes take them by name, and user-defined ones of the same form by path: `--metrics accuracy f1 my_metric.py`. A file
holds one subclass of `evaluate.Metric`, written as `evaluate.Metric` (`evaluate` would mistake an imported name for the
metric itself). Its `greater_is_better` says whether higher is better; the default is True.
"""
