"""Metrics as files: ours open with `evaluate`, a user's is tried before a run begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from finetune.data.columns import MULTI_LABEL, TOKENS, Labels
from finetune.errors import RequestError
from finetune.run.paths import METRICS
from finetune.run.recipes.question_answering import QUESTION_ANSWERING
from finetune.run.recipes.seq2seq import SEQ2SEQ
from finetune.training.metric_modules import FOLDER
from finetune.training.metrics import CountedMetrics, metrics_for

CLASSES = Labels("classification", ("bad", "good"))
OWN = """
import datasets, evaluate

class Own(evaluate.Metric):
    {better}
    def _info(self):
        value = datasets.Value({value!r})
        features = {{"predictions": value, "references": value{more}}}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(features))

    def _compute(self, predictions, references, **more):
        return {result}
"""


def own(folder: Path, result: str, better: str = "", value: str = "int64", more: str = "") -> str:
    path = folder / "own.py"
    path.write_text(OWN.format(result=result, better=better, value=value, more=more))
    return str(path)


def test_evaluate_opens_every_metric_of_ours_without_a_network(tmp_path: Path) -> None:
    """In a process of its own: `evaluate` reads where its caches lie when it is imported."""
    assert len(METRICS) >= 12
    script = "import evaluate, sys\nfor path in sys.argv[1:]: print(evaluate.load(path).features)"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", script, *(str(FOLDER / f"{name}.py") for name in METRICS)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'predictions'") == len(METRICS), done.stdout


def test_a_metric_of_ones_own_is_computed_beside_ours(tmp_path: Path) -> None:
    wrong = own(
        tmp_path, '{"wrong": sum(p != r for p, r in zip(predictions, references))}', "greater_is_better = False"
    )
    metrics = metrics_for(CLASSES, ["accuracy", wrong])
    evaluated = SimpleNamespace(predictions=np.array([[1.0, 0], [1, 0], [0, 1]]), label_ids=np.array([0, 1, 1]))
    found = metrics(evaluated)
    assert {name: found[name] for name in ("accuracy", "wrong")} == pytest.approx({"accuracy": 2 / 3, "wrong": 1})
    assert metrics.greater_is_better == {"loss": False, "accuracy": True, "wrong": False}


def test_a_metric_that_asks_for_scores_gets_them(tmp_path: Path) -> None:
    """As evaluate's own roc_auc does: of two classes, the probability of the second."""
    more = ', "prediction_scores": datasets.Value("float64")'
    path = own(tmp_path, '{"highest": max(more["prediction_scores"])}', more=more)
    evaluated = SimpleNamespace(predictions=np.array([[0.0, 0], [0, np.log(3)]]), label_ids=np.array([0, 1]))
    assert metrics_for(CLASSES, [path])(evaluated)["highest"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        pytest.param("1 / 0", r"own.py: fails on rows of a classification: line \d+: ZeroDivisionError", id="raises"),
        pytest.param("{'each': [0.1, 0.2]}", r"each is a list, but must be a number", id="no number"),
        pytest.param("{}", r"must give a dictionary of numbers", id="nothing"),
        pytest.param("{'loss': 1.0}", r"gives loss, and so does the run itself", id="the name of the loss"),
        pytest.param("{'accuracy': 1.0}", r"gives accuracy, and so does accuracy", id="another's name"),
    ],
)
def test_a_metric_that_does_not_work_is_refused_before_the_run(result: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        metrics_for(CLASSES, ["accuracy", own(tmp_path, result)])


# What the best model has more of; less of all others.
MORE = {"accuracy", "subset_accuracy", "f1_macro", "f1_micro", "matthews", "pearson", "precision", "recall", "f1"}


def test_every_figure_of_ours_knows_which_is_better() -> None:
    tasks = {"classification": 3, "regression": 2, MULTI_LABEL: 2, TOKENS: 1}
    labels = {MULTI_LABEL: ("a", "b"), "classification": ("a", "b"), TOKENS: ("O", "B-x", "I-x"), "regression": ()}
    every = [metrics_for(Labels(task, labels[task])) for task in tasks]
    assert {metric.name for one in every for metric in one.metrics} == set(METRICS) - {
        *SEQ2SEQ.metrics,
        *QUESTION_ANSWERING.metrics,
    }
    for one in every:
        found = dict(one.greater_is_better)
        assert found.pop("loss") is False
        assert {**one.greater_is_better} == {"loss": False, **{name: name in MORE for name in found}}
    assert not every[1].greater_is_better["mse"]


@pytest.mark.parametrize(
    ("name", "better", "greater"),
    [
        pytest.param("hinge_loss", "", False, id="loss"),
        pytest.param("Mean_Error", "", False, id="error"),
        pytest.param("lossless", "", True, id="loss within"),
        pytest.param("gain_or_loss", "greater_is_better = True", True, id="said"),
    ],
)
def test_what_a_metric_does_not_say_is_told_by_the_name_of_its_figure(
    name: str, better: str, greater: bool, tmp_path: Path
) -> None:
    metrics = metrics_for(CLASSES, [own(tmp_path, f"{{{name!r}: 1.0}}", better)])
    assert metrics.greater_is_better[name] is greater


WEIGHED = "{'all': float(sum(more.get('sample_weight', [1] * len(predictions))))}"


@pytest.mark.parametrize(
    ("result", "more", "why"),
    [
        pytest.param(
            "{'x': len(more['prediction_scores'])}",
            ', "prediction_scores": datasets.Value("float64")',
            "ValueError",
            id="scores",
        ),
        pytest.param("{'x': 1 / (1 - len(more))}", "", "ZeroDivisionError", id="refuses weights"),
        pytest.param("{'x': len(predictions)}", "", "gives another x than for the rows", id="passes weights over"),
    ],
)
def test_a_metric_that_cannot_take_a_pipelines_sums_is_refused_before_the_run(
    result: str, more: str, why: str, tmp_path: Path
) -> None:
    path = own(tmp_path, result, more=more)
    CountedMetrics(2, [path])
    with pytest.raises(RequestError, match=rf"own.py: a pipeline's evaluation .*{why}.*drop --pipeline_parallel_size"):
        CountedMetrics(2, [path], of_sums=True)


def test_a_metric_that_takes_weights_gives_the_figures_of_a_pipelines_sums(tmp_path: Path) -> None:
    metrics = CountedMetrics(2, ["accuracy", "f1", "matthews", own(tmp_path, WEIGHED)], of_sums=True)
    assert metrics(SimpleNamespace(predictions=np.array([[8.0, 1, 0, 2, 5]]), label_ids=None))["all"] == 8


def test_a_metric_of_another_task_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"--metrics matthews: is not for multi label classification\. Available are accuracy, f1"
    ):
        metrics_for(Labels(MULTI_LABEL, ("a", "b")), ["matthews"])
    with pytest.raises(RequestError, match=r"accuracy: is not for token classification\. Available are entity_f1"):
        metrics_for(Labels(TOKENS, ("O", "B-x", "I-x")), ["accuracy"])


def test_classes_are_not_made_of_numbers_by_cutting_them() -> None:
    for name in ("accuracy", "f1", "matthews"):
        with pytest.raises(RequestError, match=f"{name}: is not for regression. Available are mse, pearson"):
            metrics_for(Labels("regression", ()), [name])


def test_a_file_that_holds_no_metric_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    with pytest.raises(RequestError, match=r"has 0 subclasses of evaluate\.Metric"):
        metrics_for(CLASSES, [str(path)])
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(RequestError, match=r"cannot be loaded: line \d+: ModuleNotFoundError"):
        metrics_for(CLASSES, [str(path)])
    with pytest.raises(RequestError, match=r"--metrics meteor: is neither a built-in metric \(accuracy, "):
        metrics_for(CLASSES, ["meteor"])
