"""The lines of a training's logs as people read and programs parse them: transformers' callbacks, which write every
number as a quoted text (transformers 5.23, trainer_callback.py), with numbers as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

NOT_SHOWN = "total_flos"


class Lines(PrinterCallback):
    """A line a log, from one rank."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            print(rounded(logs), flush=True)


class Bar(ProgressCallback):
    """The same above transformers' progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(str(rounded(logs)))


def rounded(logs: Mapping[str, Any]) -> dict[str, Any]:
    """To four figures. metrics.jsonl has all of them."""
    shown = {name: value for name, value in logs.items() if name != NOT_SHOWN}
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in shown.items()}


def show_numbers(trainer: Trainer) -> None:
    """Put ours in the place of transformers' own; a notebook's table stays."""
    callbacks = trainer.callback_handler.callbacks
    for place, one in enumerate(callbacks):
        ours = {PrinterCallback: Lines, ProgressCallback: Bar}.get(type(one))
        if ours is not None:
            callbacks[place] = ours()
