"""Metrics of `evaluate`, ours by name and the user's by path, tried on a few rows before a run begins.

They are imported from their own location. `evaluate.load` opens the same files, but copies them to the user's home
first, and makes each rank of a node wait a second for a shared cache file whenever it computes.
"""

from __future__ import annotations

import importlib.util
import numbers
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import evaluate
import numpy as np

import finetune.metrics
from finetune.data.cache import cache_home
from finetune.data.columns import Labels
from finetune.errors import RequestError, first_line
from finetune.run.paths import METRICS
from finetune.training.figures import LESS_IS_BETTER

FOLDER = Path(finetune.metrics.__file__).parent


@dataclass(frozen=True)
class Metric:
    """One of a run's metric modules: its name as given, and the figures that it returned on the sample, each with
    whether greater is better."""

    name: str
    module: Any
    figures: Mapping[str, bool]

    def compute(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """Its figures, from those of the `inputs` that it declares as features."""
        return {name: float(value) for name, value in _compute(self.module, inputs).items()}


class LoadedMetrics:
    """The metrics of evaluations of rows with these `labels`; `own` are those that come from no module, with whether
    greater is better."""

    labels: Labels
    metrics: tuple[Metric, ...]
    own: Mapping[str, bool] = MappingProxyType({"loss": False})

    def figures(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """What the modules make of `predictions` and `references`."""
        return {name: value for metric in self.metrics for name, value in metric.compute(inputs).items()}

    @property
    def greater_is_better(self) -> dict[str, bool]:
        """Every metric of an evaluation, and whether greater is better."""
        return {**self.own, **{figure: better for one in self.metrics for figure, better in one.figures.items()}}


def load_metrics(
    names: Sequence[str], config: str | None, sample: Mapping[str, Any], task: str, taken: Sequence[str] = ()
) -> tuple[Metric, ...]:
    """Load these metrics with the configuration `config` of `evaluate`, and try each on `sample`.

    Raises RequestError for a metric that cannot be loaded, that fails on rows of the `task`, that returns something
    other than numbers, or that returns a name that another metric or the run itself (`taken`) already uses.
    """
    found: list[Metric] = []
    givers = dict.fromkeys(taken, "the run itself")
    for name in names:
        said = f"--metrics {name}"
        module = _open(name, config, said)
        try:
            figures = _compute(module, sample)
        except Exception as error:  # a user's metric may raise anything
            fit = [one for one in METRICS if _fits(_open(one, config, said), sample)] if name in METRICS else []
            if fit:
                raise RequestError(f"{said}: is not for {task}. Available are {', '.join(fit)}.") from error
            raise RequestError(
                f"{said}: fails on rows of a {task}: {_told(error, name)} Leave it out, or fix it."
            ) from error
        for figure, value in figures.items():
            if not isinstance(value, numbers.Real):
                raise RequestError(
                    f"{said}: {figure} is a {type(value).__name__}, but must be a number. Give its mean."
                )
            if figure in givers:
                raise RequestError(f"{said}: gives {figure}, and so does {givers[figure]}. Drop or rename one.")
            givers[figure] = name
        found.append(Metric(name, module, {figure: _greater_is_better(module, figure) for figure in figures}))
    return tuple(found)


def _told(error: Exception, name: str) -> str:
    """The error's message, and the last line of the metric's own file in its traceback."""
    own = _path(name).resolve()
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).resolve() == own]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {first_line(error, 300).rstrip('.')}."


def _path(name: str) -> Path:
    return FOLDER / f"{name}.py" if name in METRICS else Path(name).expanduser()


def _greater_is_better(module: Any, figure: str) -> bool:
    """From an attribute of this name of the metric's class (unknown to `evaluate`), or else from the figure's name."""
    return bool(getattr(module, "greater_is_better", not figure.lower().endswith(LESS_IS_BETTER)))


def _fits(module: Any, sample: Mapping[str, Any]) -> bool:
    try:
        return bool(_compute(module, sample))
    except Exception:  # `evaluate` raises if the rows lack the metric's features
        return False


def _compute(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The metric's output. Only metrics that ask for scores, such as ROC AUC, get them."""
    features = module.features[0] if isinstance(module.features, list) else module.features
    wanted = {name: value for name, value in inputs.items() if name in features or name == "sample_weight"}
    for name in features.keys() & wanted.keys():
        if str(getattr(features[name], "dtype", "")).startswith("int") and np.asarray(wanted[name]).dtype.kind == "f":
            raise TypeError(f"it takes integer {name}, and these have fractions.")  # which it would truncate
    found = module.compute(**wanted)
    if not isinstance(found, dict) or not found:
        raise TypeError(f"its compute gives {found!r}, but must give a dictionary of numbers.")
    return found


def _open(name: str, config: str | None, said: str) -> Any:
    path = _path(name)
    if not path.is_file():
        raise RequestError(
            f"{said}: is neither a built-in metric ({', '.join(METRICS)}) nor a file. Give one of these, or the path "
            "of a Python file with a subclass of evaluate.Metric."
        )
    if path.suffix != ".py":
        raise RequestError(f"{said}: is not a Python file. Give one with a subclass of evaluate.Metric.")
    spec = importlib.util.spec_from_file_location(f"finetune_metric_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(script)
        kinds = [kind for kind in vars(script).values() if _is_metric(kind) and kind.__module__ == script.__name__]
        if len(kinds) == 1:
            return kinds[0](config_name=config, keep_in_memory=True, cache_dir=str(cache_home() / "metrics"))
    except Exception as error:  # a user's file may raise anything
        raise RequestError(f"{said}: cannot be loaded: {_told(error, name)} Fix the file.") from error
    raise RequestError(f"{said}: has {len(kinds)} subclasses of evaluate.Metric, but must have one.")


def _is_metric(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, evaluate.EvaluationModule)
