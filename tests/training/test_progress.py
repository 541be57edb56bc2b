"""Logged numbers are printed as numbers, by one rank."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback

from finetune.training.progress import Bar, Lines, rounded, show_numbers

LOGS = {"loss": 0.69314718, "learning_rate": 1.23456e-7, "epoch": 1.0, "step": 3, "note": "x", "total_flos": 1e18}
SHOWN = {"loss": 0.6931, "learning_rate": 1.235e-7, "epoch": 1.0, "step": 3, "note": "x"}


def test_numbers_are_numbers() -> None:
    assert rounded(LOGS) == SHOWN


@pytest.mark.parametrize("speaks", [True, False])
def test_a_line_is_printed_by_the_first_rank_alone(speaks: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logs = dict(LOGS)
    Lines().on_log(None, SimpleNamespace(is_world_process_zero=speaks), None, logs=logs)
    out = capsys.readouterr().out
    assert (ast.literal_eval(out) if speaks else out) == (SHOWN if speaks else "")
    assert logs == LOGS  # metrics.jsonl is written from the same


def test_the_bar_writes_the_same_line() -> None:
    said: list[str] = []
    bar = Bar()
    bar.training_bar = SimpleNamespace(write=said.append)
    bar.on_log(None, SimpleNamespace(is_world_process_zero=True), None, logs=LOGS)
    assert [ast.literal_eval(line) for line in said] == [SHOWN]


def test_ours_take_the_place_of_transformers_own() -> None:
    kept = DefaultFlowCallback()
    handler = SimpleNamespace(callbacks=[kept, PrinterCallback(), ProgressCallback()])
    show_numbers(SimpleNamespace(callback_handler=handler))
    assert [type(one) for one in handler.callbacks] == [DefaultFlowCallback, Lines, Bar]
    assert handler.callbacks[0] is kept
