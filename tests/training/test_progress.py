"""What a run shows: numbers as numbers, by one rank; on a terminal a live line, tables and a summary."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from screen import rows_on_screen
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging
from transformers.utils.notebook import NotebookProgressCallback

from finetune.run.choose import recipes
from finetune.run.launch import Launch
from finetune.run.resolve import resolve
from finetune.run.run import Run
from finetune.training import progress, summary
from finetune.training.progress import Lines, LiveLine, display, rounded, show_numbers, tidy_terminal

LOGS = {"loss": 0.69314718, "learning_rate": 1.23456e-7, "epoch": 1.0, "step": 3, "note": "x", "total_flos": 1e18}
SHOWN = {"loss": 0.6931, "learning_rate": 1.235e-7, "epoch": 1.0, "step": 3, "note": "x"}
STEP = {"loss": 2.0, "real_tokens_per_second": 12345.6, "samples_per_second": 3.25}


def run_of(recipe: str, *words: str) -> Run:
    return resolve(recipes()[recipe], list(words), Launch())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Shown:
    """A live line on a terminal of `columns`, told what a trainer tells."""

    def __init__(
        self, columns: int = 100, greater_is_better: dict[str, bool] | None = None, speaks: bool = True
    ) -> None:
        self.columns, self.file = columns, Terminal()
        console = Console(file=self.file, force_terminal=True, width=columns, soft_wrap=True)
        self.line = LiveLine(console, greater_is_better or {})
        self.state = SimpleNamespace(is_world_process_zero=speaks, global_step=0, max_steps=6, log_history=[])
        OPEN.append(self)

    def tell(self, event: str, **told: Any) -> None:
        self.line.drawn = 0.0  # no matter how soon
        getattr(self.line, f"on_{event}")(None, self.state, None, **told)

    def step(self, number: int) -> None:
        self.state.global_step = number
        self.tell("step_end")

    @property
    def rows(self) -> list[str]:
        written = self.file.getvalue().replace("\n", "\r\n")  # as a terminal's driver does
        return [row for row in rows_on_screen(written, self.columns) if row]

    @property
    def table(self) -> list[list[str]]:
        """The last one."""
        last = max(place for place, row in enumerate(self.rows) if row.startswith("evaluation"))
        return [row.split() for row in self.rows[last + 1 :] if not row.startswith(("step", "\u2500"))]


OPEN: list[Shown] = []


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the tests themselves write to. No line outlives its test."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(progress, "peak_memory_bytes", lambda: 3 * 2**29)
    yield
    while OPEN:
        OPEN.pop().line.stop()


def test_numbers_are_numbers() -> None:
    assert rounded(LOGS) == SHOWN


@pytest.mark.parametrize("speaks", [True, False])
def test_a_line_is_printed_by_the_first_rank_alone(speaks: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logs = dict(LOGS)
    Lines().on_log(None, SimpleNamespace(is_world_process_zero=speaks), None, logs=logs)
    out = capsys.readouterr().out
    assert (ast.literal_eval(out) if speaks else out) == (SHOWN if speaks else "")
    assert logs == LOGS  # metrics.jsonl is written from the same


@pytest.mark.parametrize(
    ("is_terminal", "disable_tqdm", "env", "kind"),
    [
        (True, False, {}, LiveLine),
        (True, False, {"NO_COLOR": "1"}, LiveLine),
        (True, True, {}, Lines),
        (True, False, {"TERM": "dumb"}, Lines),
        (False, False, {}, Lines),
        (False, False, {"FORCE_COLOR": "1"}, Lines),
    ],
)
def test_a_line_is_drawn_over_on_a_terminal_that_can_alone(
    is_terminal: bool, disable_tqdm: bool, env: dict[str, str], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal() if is_terminal else io.StringIO())
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert type(display(SimpleNamespace(disable_tqdm=disable_tqdm), None)) is kind


def test_ours_take_the_place_of_transformers_own_and_a_notebook_keeps_its_table() -> None:
    kept, table = DefaultFlowCallback(), NotebookProgressCallback()
    handler = SimpleNamespace(callbacks=[kept, PrinterCallback(), ProgressCallback(), table])
    args = SimpleNamespace(disable_tqdm=True)
    show_numbers(SimpleNamespace(callback_handler=handler, args=args, compute_metrics=None))  # type: ignore[arg-type]
    assert [type(one) for one in handler.callbacks] == [DefaultFlowCallback, Lines, Lines, NotebookProgressCallback]
    assert handler.callbacks[0] is kept
    assert handler.callbacks[3] is table


def test_a_training_is_one_line() -> None:
    shown = Shown()
    shown.tell("train_begin")
    shown.step(1)
    assert shown.rows[0].startswith("step 1/6  peak 1.50 GiB  0:00:0")
    assert shown.rows[0].endswith(" left")
    shown.step(2)
    shown.tell("log", logs=STEP)
    assert shown.rows[0].startswith("step 2/6  loss 2  12,346 tokens/s  peak 1.50 GiB  0:00:0")
    shown.tell("prediction_step", eval_dataloader=[1, 2])
    assert "step 2/6  evaluating 1/2  " in shown.rows[0]
    shown.tell("evaluate")
    shown.step(6)
    shown.tell("train_end")
    assert len(shown.rows) == 1
    assert shown.rows[0].startswith("step 6/6  loss 2  12,346 tokens/s  peak 1.50 GiB  in 0:00:0")
    assert shown.file.getvalue().endswith("\n\x1b[?25h")  # what comes next has a line of its own, and a cursor


def test_nothing_is_drawn_before_the_first_step_is_over() -> None:
    shown = Shown()
    shown.tell("train_begin")
    assert shown.file.getvalue() == ""


def test_pictures_are_counted_in_samples() -> None:
    shown = Shown()
    shown.tell("train_begin")
    shown.tell("log", logs={"loss": 2.0, "samples_per_second": 3.25})
    assert "  3.2 samples/s  " in shown.rows[0]


@pytest.mark.parametrize(
    ("columns", "line"),
    [(46, "step 3/6  loss 2  peak 1.50 GiB  0"), (31, "step 3/6  loss 2  0"), (23, "step 3/6  0:00"), (9, "step 3/6")],
)
def test_a_narrow_terminal_has_less_of_the_line_and_never_two(columns: int, line: str) -> None:
    shown = Shown(columns)
    shown.tell("train_begin")
    shown.tell("log", logs={"loss": 2.0})
    shown.step(3)
    assert shown.rows[0].startswith(line)
    assert len(shown.rows) == 1


def test_another_rank_shows_nothing() -> None:
    shown = Shown(speaks=False)
    for event in ("train_begin", "step_end", "prediction_step", "evaluate", "train_end"):
        shown.tell(event)
    shown.tell("log", logs=STEP)
    shown.tell("log", logs={"eval_loss": 1.0})
    assert shown.file.getvalue() == ""


def test_an_evaluation_is_a_table_of_before_now_and_best() -> None:
    shown = Shown(greater_is_better={"accuracy": True, "ter": False})
    shown.tell("train_begin")
    speed = {"eval_runtime": 1.0, "eval_samples_per_second": 2.0, "epoch": 1.0}
    shown.tell("log", logs={"eval_loss": 0.5, "eval_accuracy": 0.25, "eval_ter": 30.0, **speed})
    assert shown.table == [["metric", "now"], ["loss", "0.5"], ["accuracy", "0.25"], ["ter", "30"]]
    shown.tell("log", logs={"eval_loss": 0.75, "eval_accuracy": 0.5, "eval_ter": 20.0, **speed})
    shown.tell("log", logs={"eval_loss": float("nan"), "eval_accuracy": 0.375, "eval_ter": 25.0, **speed})
    assert shown.table == [
        ["metric", "before", "now", "best"],
        ["loss", "0.75", "nan", "0.5"],
        ["accuracy", "0.5", "0.375", "0.5"],
        ["ter", "20", "25", "20"],
    ]


@pytest.mark.parametrize(
    ("figure", "best"),
    [
        ("bits_per_character", "1"),
        ("token_accuracy", "3"),
        ("logp_rejected", "1"),
        ("reward_margin", "3"),
        ("kl", "1"),
        ("answers", ""),
    ],
)
def test_the_best_of_a_figure_is_the_less_or_the_more_or_there_is_none(figure: str, best: str) -> None:
    shown = Shown()
    shown.tell("train_begin")
    for value in (1.0, 3.0):
        shown.tell("log", logs={f"eval_{figure}": value})
    assert shown.table[-1] == [figure, "1", "3", *([best] if best else [])]


def test_a_resumed_run_knows_its_evaluations_of_before() -> None:
    shown = Shown()
    shown.state.log_history = [{"eval_perplexity": 8.0, "step": 2}, {"loss": 3.0}, {"eval_perplexity": 9.0, "step": 4}]
    shown.tell("train_begin")
    shown.tell("log", logs={"eval_perplexity": 8.5})
    assert shown.table == [["metric", "before", "now", "best"], ["perplexity", "9", "8.5", "8"]]


def test_what_others_write_goes_above_the_line_and_back_where_it_went(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Shown(columns=60)
    monkeypatch.setattr(sys, "stdout", shown.file)
    monkeypatch.setattr(sys, "stderr", shown.file)
    handler = logging.StreamHandler(shown.file)  # made before, as libraries make theirs
    library, bars = logging.getLogger("a.library"), transformers_logging.is_progress_bar_enabled()
    library.addHandler(handler)
    try:
        shown.tell("train_begin")
        shown.step(0)
        print("a" * 70)
        sys.stdout.write("half ")
        shown.step(1)
        print("a line")
        library.warning("logged")
        print("warned", file=sys.stderr)
        assert not transformers_logging.is_progress_bar_enabled()
        shown.tell("train_end")
        assert (sys.stdout, sys.stderr, handler.stream) == (shown.file,) * 3
        assert transformers_logging.is_progress_bar_enabled() == bars
        print("after")
    finally:
        library.removeHandler(handler)
    rows = shown.rows
    assert rows[:5] == ["a" * 60, "a" * 10, "half a line", "logged", "warned"]
    assert rows[5].startswith("step 1/6  ")
    assert rows[6:] == ["after"]


def test_a_run_that_fails_leaves_the_line_before_it_says_why() -> None:
    shown, given = Shown(), sys.stderr
    trainer = SimpleNamespace(handler=SimpleNamespace(callbacks=[shown.line]))

    def fail() -> None:
        with tidy_terminal(trainer):
            shown.tell("train_begin")
            shown.step(1)
            assert sys.stderr is not given or not given.isatty()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert sys.stderr is given
    assert shown.file.getvalue().endswith("\n\x1b[?25h")


def test_an_evaluation_without_a_training_leaves_its_table_alone() -> None:
    shown = Shown()
    shown.state.max_steps = 0
    shown.tell("prediction_step", eval_dataloader=[1])
    shown.tell("log", logs={"eval_loss": 1.0})
    shown.tell("evaluate")
    assert [row for row in shown.rows if "GiB" in row] == []
    assert shown.table == [["metric", "now"], ["loss", "1"]]


def test_the_summary_is_the_folder_as_a_tree_and_what_to_do_next(tmp_path: Path) -> None:
    for name in ("README.md", "model.safetensors", "config.json", "ds_config.json", "run.json", "_lock", "mine.txt"):
        (tmp_path / name).touch()
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    file = Terminal()
    console = Console(file=file, width=100, soft_wrap=True, force_terminal=False)
    summary.print_summary(console, tmp_path, run_of("causal_lm"))
    rows = dict(row[4:].split("  ", 1) for row in file.getvalue().splitlines() if row[:1] in "\u251c\u2514")
    assert {name: phrase.strip() for name, phrase in rows.items()} == {
        "README.md": "model card: results, pictures, how to use the model",
        "model.safetensors": "weights",
        "ds_config.json": 'DeepSpeed config, every "auto" filled',
        "config.json": "config to load it with",
        "checkpoint-9/ .. checkpoint-100/ (3)": "checkpoint, for --resume auto",
        "run.json": "which run this is",
        "mine.txt": "not of the recipe",
    }
    assert f"next: finetune report {tmp_path}" in file.getvalue()
    assert f"next: finetune generate {tmp_path} --prompts" in file.getvalue()
    for recipe, flags, writes in (
        ("seq_cls", [], False), ("causal_lm_pipeline", [], True), ("seq2seq", [], False), ("preference", [], True),
        ("preference", ["--loss", "reward"], False),
    ):  # fmt: skip
        commands = summary.next_commands(tmp_path, run_of(recipe, *flags))
        assert any("finetune generate" in command for command in commands) is writes


def test_the_summary_of_a_run_folder_on_a_narrow_terminal_has_a_line_a_row(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(json.dumps("card"))
    file = Terminal()
    console = Console(file=file, width=30, soft_wrap=True, force_terminal=False)
    summary.print_summary(console, tmp_path, run_of("seq_cls"))
    rows = [row for row in file.getvalue().splitlines() if "README.md" in row]
    assert len(rows) == 1
    assert rows[0].startswith("\u2514\u2500\u2500 README.md  model card")
    assert len(rows[0]) <= 30
