"""Tell `finetune supervise` where the run is: which step, on how many ranks, and the samples of a step that failed."""

from __future__ import annotations

import copy
import json
import os
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from finetune.run import supervised
from finetune.run.launch import read_launch

WIDTH = 32  # bytes of a position, padded: each overwrites the one before


def follow(trainer: Any) -> None:
    """If the run is supervised, keep its position in the attempt's folder from now on. All ranks call it."""
    attempt = supervised.own_attempt()
    if attempt is None or not attempt.is_dir():
        return
    handler = getattr(trainer, "handler", None) or trainer.callback_handler
    handler.add_callback(Position(trainer, attempt))


class Position(TrainerCallback):
    """`position-RANK` holds the step that is being worked on, from reading its batch to the optimizer's step; or the
    one after which the rank evaluates, saves or ends. It is written without flushing, because only the host's own
    failure would lose it, and each rank writes its own."""

    def __init__(self, trainer: Any, attempt: Path) -> None:
        self.trainer, self.attempt, self.launch = trainer, attempt, read_launch()
        self.file: int | None = None
        self.failed_at: int | None = None
        with suppress(OSError, ValueError):  # most attempts have none
            self.failed_at = int((attempt / supervised.FAILED_AT).read_text())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = self.attempt / f"{supervised.POSITION}{self.launch.rank}"
        with suppress(OSError):
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if self.launch.speaks:
            self._tell_start(state.global_step)
        self._read(state.global_step + 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write({"step": state.global_step + 1})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self._write({"after": state.global_step})
        else:
            self._read(state.global_step + 1)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not control.should_training_stop:
            self._read(state.global_step + 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write({"after": state.global_step})

    def _tell_start(self, step: int) -> None:
        home, hosts, ranks = self.attempt.parent, supervised.hosts_of_launch(), self.launch.world_size
        stopped = supervised.stopped_at(supervised.told(home))
        seconds = None if stopped is None else round(time.time() - stopped, 1)
        again = "" if seconds is None else f", {seconds:.0f} s after it had stopped"
        batch = self.trainer.global_batch_size
        facts: dict[str, Any] = {"attempt": supervised.number_of(self.attempt), "command": supervised.own_command()}
        facts |= {"ranks": ranks, "hosts": hosts, "step": step, "global_batch_size": batch, "seconds": seconds}
        said = f"training on {ranks} rank(s) of {hosts} host(s) from step {step}, global batch {batch}{again}"
        supervised.tell(home, supervised.TRAINING, said, **facts)

    def _read(self, step: int) -> None:
        if step == self.failed_at and self.launch.speaks:
            self.failed_at = None
            with suppress(Exception):  # this only names samples; whatever is wrong with it must not end the training
                (self.attempt / supervised.SAMPLES).write_text(json.dumps(self._samples_of(step)))
        self._write({"reading": step})

    def _samples_of(self, step: int) -> dict[str, list[int]]:
        """Row numbers in the prepared training set: the `step`'s, and those of the next step's first micro-batch, which
        is read `ahead` (accelerate 1.15, data_loader.py, DataLoaderShard). Empty for a stream."""
        if self.trainer.sampler is None:
            return {}
        sampler, batch = copy.copy(self.trainer.sampler), self.trainer.global_batch_size
        epoch, place = divmod(step - 1, len(sampler) // batch)
        sampler.set_epoch(epoch)
        micro_batch = batch // self.trainer.args.gradient_accumulation_steps
        rows = list(islice(iter(sampler), place * batch, (place + 1) * batch + micro_batch))
        return {"step": rows[:batch], "ahead": rows[batch:]}

    def _write(self, place: dict[str, int]) -> None:
        if self.file is not None:
            with suppress(OSError):
                os.pwrite(self.file, json.dumps(place).ljust(WIDTH).encode(), 0)
