"""Metrics as `evaluate` knows them, a file each: `evaluate.load("finetune/metrics/f1.py")` opens one, offline as well.

A recipe takes them by name, and anybody's in the same form by path: `--metrics accuracy f1 my_metric.py`. A file holds
one subclass of `evaluate.Metric`, reached as `evaluate.Metric` (`evaluate` takes a name that is imported from there for
the metric itself). Its `greater_is_better` says which of two values is the better one: True where it says nothing.
"""
