"""What a run shows while it trains. On a terminal: one live line, and a table at each evaluation. Elsewhere, and with
--disable_tqdm True: one line per log, which programs parse. A notebook keeps transformers' own table."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_utils import has_length
from transformers.utils import logging as transformers_logging

from finetune.report.table import Table, print_table
from finetune.report.text import GIB
from finetune.training.figures import more_is_better
from finetune.training.speed import peak_memory_bytes

NOT_SHOWN = "total_flos"
OF_SPEED = ("_runtime", "_per_second", "_time")  # endings of evaluation results that measure speed, not the model
SPEEDS = (("real_tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s"))
DRAW_SECONDS = 0.1  # least time between two redraws


class Lines(PrinterCallback):
    """One line per log, from one rank, with plain numbers: transformers quotes them (5.23, trainer_callback.py)."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            print(rounded(logs), flush=True)


class LiveLine(TrainerCallback):
    """A status line that is redrawn in place, on one rank; other output goes above it. The training loop redraws it: a
    separate thread might hold a lock while a data loader forks its workers."""

    def __init__(self, console: Console, greater_is_better: Mapping[str, bool]) -> None:
        self.console, self.greater_is_better = console, greater_is_better
        self.live: Live | None = None
        self.stack = contextlib.ExitStack()  # undone when the line ends
        self.logs: Mapping[str, Any] = {}  # the last training log
        self.before: dict[str, float] = {}  # each metric's previous value
        self.best: dict[str, float] = {}
        self.step = self.steps = self.first = self.batches = 0
        self.batches_in_all = 0
        self.is_training, self.began, self.drawn = False, 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs, self.before, self.best = {}, {}, {}
        for row in state.log_history:  # not empty in a resumed run
            self._note(metrics_of(row))
        self.step = self.first = state.global_step
        # First drawn after the first step, as torch's C++ code prints warnings in it on every rank (reducer.cpp).
        self.steps, self.began, self.is_training = state.max_steps, time.monotonic(), True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self._draw(state)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        self.batches += 1
        self.batches_in_all = len(eval_dataloader) if has_length(eval_dataloader) else 0
        self._draw(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            self.logs = logs
            self._draw(state, now=True)
        elif metrics := metrics_of(logs):
            where = f" after step {state.global_step:,} of {state.max_steps:,}" if state.max_steps else ""
            print_table(self.console, self._table(f"evaluation{where}", metrics))
            self._note(metrics)
        elif "train_runtime" not in logs:  # the closing log, which the last line and the summary cover
            print(rounded(logs), flush=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches = 0
        if not self.is_training:
            self.stop()

    on_predict = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_training = False
        self.stop()

    def stop(self) -> None:
        """End the live line. The last one of training stays on the screen."""
        self.stack.close()
        self.live = None

    def _draw(self, state: Any, now: bool = False) -> None:
        if not state.is_world_process_zero or not (now or time.monotonic() - self.drawn > DRAW_SECONDS):
            return
        self.drawn = time.monotonic()
        if self.live is None:
            self.live = Live(
                get_renderable=self._line,
                console=self.console,
                auto_refresh=False,
                transient=not self.is_training,
                redirect_stderr=sys.stderr.isatty(),
            )
            self.stack.enter_context(_others_above(self.live))
        self.live.refresh()

    def _line(self) -> Text:
        """As many parts as fit on the terminal."""
        seconds, done = time.monotonic() - self.began, self.step - self.first
        parts = [f"step {self.step:,}/{self.steps:,}"] if self.steps else []
        if self.batches:
            parts.append(f"evaluating {self.batches:,}" + (f"/{self.batches_in_all:,}" if self.batches_in_all else ""))
        elif "loss" in self.logs:
            parts.append(f"loss {self.logs['loss']:.4g}")
        speeds = [(self.logs[name], unit) for name, unit in SPEEDS if name in self.logs]
        parts += [f"{speed:,.{0 if speed >= 100 else 1}f} {unit}" for speed, unit in speeds[:1]]
        parts.append(f"peak {peak_memory_bytes() / GIB:.2f} GiB")
        if not self.is_training and self.steps:
            parts.append(f"in {timedelta(seconds=round(seconds))}")
        elif done > 0:  # a run that was rolled back may be before its first step
            parts.append(f"{timedelta(seconds=round(seconds / done * (self.steps - self.step)))} left")
        while len("  ".join(parts)) >= self.console.width and len(parts) > 1:
            parts.pop(-2 if len(parts) > 2 else -1)
        return Text("  ".join(parts), no_wrap=True, overflow="crop")

    def _table(self, title: str, metrics: Mapping[str, float]) -> Table:
        rows = []
        for name, now in metrics.items():
            values = self.before.get(name), now, self._better(name, now)
            rows.append((name.removeprefix("eval_"), *("" if one is None else f"{one:.4g}" for one in values)))
        table = Table(title, ("metric", "before", "now", "best"), tuple(rows), expendable=("before", "best"))
        return table.fitted(self.console.width) if self.before else table.without(table.expendable)

    def _note(self, metrics: Mapping[str, float]) -> None:
        better = {name: self._better(name, now) for name, now in metrics.items()}
        self.best |= {name: value for name, value in better.items() if value is not None}
        self.before |= metrics

    def _better(self, name: str, now: float) -> float | None:
        """The best value so far; None if neither more nor less is better."""
        best, figure = self.best.get(name, math.nan), name.removeprefix("eval_")
        more = self.greater_is_better.get(figure, more_is_better(figure))
        if more is None or math.isnan(best):
            return None if more is None else now
        return max(best, now) if more else min(best, now)


@contextlib.contextmanager
def _others_above(live: Live) -> Iterator[None]:
    """In this block other output goes above the line, and transformers draws no progress bars."""
    draws_bars, given = transformers_logging.is_progress_bar_enabled(), (sys.stdout, sys.stderr)
    transformers_logging.disable_progress_bar()
    with live:
        live.console.show_cursor(True)  # a killed rank could not restore it
        proxies = sys.stdout, sys.stderr
        _move_handlers(given, proxies)
        try:
            yield
        finally:
            _move_handlers(proxies, given)
            if draws_bars:
                transformers_logging.enable_progress_bar()


def _move_handlers(before: Sequence[Any], now: Sequence[Any]) -> None:
    """Redirect logging handlers of libraries, which keep the stream they were created with."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if vars(handler).get("stream") in before:
                handler.setStream(now[before.index(handler.stream)])


def metrics_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's metrics, without its speed."""
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name.startswith("eval_") and not name.endswith(OF_SPEED)}


def rounded(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Round to four significant digits. metrics.jsonl has all digits."""
    shown = {name: value for name, value in logs.items() if name != NOT_SHOWN}
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in shown.items()}


def on_terminal() -> bool:
    """Whether output goes to a terminal that can redraw a line."""
    return sys.stdout.isatty() and Console().is_interactive


def terminal_of(args: Any) -> Console | None:
    """The terminal of a run with these training arguments; None if it is not to be used. It does not wrap others'
    lines."""
    is_used = on_terminal() and not args.disable_tqdm
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False) if is_used else None


def display(args: Any, compute_metrics: Any) -> Lines | LiveLine:
    """The display for these training arguments. `compute_metrics` may say for each metric whether more is better."""
    console = terminal_of(args)
    return LiveLine(console, getattr(compute_metrics, "greater_is_better", {})) if console else Lines()


def show_numbers(trainer: Trainer) -> None:
    """Replace transformers' own display by ours; a notebook's table stays."""
    callbacks = trainer.callback_handler.callbacks
    for place, one in enumerate(callbacks):
        if type(one) in (PrinterCallback, ProgressCallback):
            callbacks[place] = display(trainer.args, trainer.compute_metrics)


@contextlib.contextmanager
def tidy_terminal(trainer: Any) -> Iterator[None]:
    """In this block, whatever ends the run first ends the live line."""
    try:
        yield
    finally:
        handler = getattr(trainer, "handler", None) or trainer.callback_handler  # a pipeline's, or the Trainer's
        for one in handler.callbacks:
            if isinstance(one, LiveLine):
                one.stop()
