"""Undo what a run changes in its process: in Python and in notebooks, the process lives on."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from finetune.training.interruption import SIGNALS

QUIETED = ("transformers", "datasets", "accelerate", "DeepSpeed", "torch.distributed", "datasets.packaged_modules")


@contextmanager
def left_as_found(argv: Sequence[str]) -> Iterator[None]:
    """Inside, sys.argv is `argv`, which the run records. However it ends, this restores environment variables, signal
    handlers, log levels, warning filters, progress bars, torch's thread count and random states, finishes a tracker's
    run, releases the run folder's lock, and returns freed memory to the system."""
    environment, words = dict(os.environ), sys.argv
    levels = {name: logging.getLogger(name).level for name in QUIETED}
    is_main = threading.current_thread() is threading.main_thread()  # only it may set a handler
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)} if is_main else {}
    with _libraries_as_found(), warnings.catch_warnings():
        sys.argv = list(argv)
        try:
            yield
        finally:
            sys.argv = words
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)


@contextmanager
def _libraries_as_found() -> Iterator[None]:
    import datasets
    import numpy
    import torch
    import transformers

    from finetune.training.checkpoints.lock import give_up_locks
    from finetune.training.kept_memory import stop_keeping_freed_memory

    bars = transformers.utils.logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    threads, had_run = torch.get_num_threads(), _wandb_run() is not None
    drawn = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        give_up_locks()
        if not had_run and _wandb_run() is not None:  # else the next run would log into it
            sys.modules["wandb"].finish()
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        torch.set_num_threads(threads)
        if bars[0]:
            transformers.utils.logging.enable_progress_bar()
        if bars[1]:
            datasets.enable_progress_bars()
        stop_keeping_freed_memory()


def _wandb_run() -> object:
    return getattr(sys.modules.get("wandb"), "run", None)
