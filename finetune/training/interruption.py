"""Stop on a cluster's signal: after the current step, with a checkpoint, on all ranks together."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import SaveStrategy

from finetune.errors import InterruptedRunError

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)  # sent by Slurm (--signal); sent by Kubernetes and the launchers
POLL_SECONDS = 0.2
SAVE_AGAIN = 1  # what a rank casts whose asynchronous save has failed; signals are larger


class StopOnSignal(TrainerCallback):
    """SIGUSR1 or SIGTERM to any rank ends training: the ranks finish their step (with several ranks, also the next),
    save a checkpoint together (none with --save_strategy no), and each raises `InterruptedRunError`. An evaluation due
    at that step is skipped, to leave the time for the checkpoint; one already running is finished first.

    The Trainer's own `enable_jit_checkpoint` handles only SIGTERM, and each rank separately: a rank that gets the
    signal saves while the others go on training (transformers 5.23, trainer_jit_checkpoint.py).

    A rank that has not saved within `grace_seconds` of the signal exits anyway, with the same status: the sender of the
    signal would soon kill it, and a hanging rank would block the others forever.
    """

    def __init__(self, grace_seconds: float = 0.0) -> None:
        self.grace_seconds = grace_seconds  # 0: no limit
        self.grace: threading.Thread | None = None
        self.is_over = threading.Event()  # the grace period no longer applies
        self.steps = 0  # finished since training began
        self.received = 0  # the signal that this rank received
        self.has_lost_a_save = False  # this rank's asynchronous one has failed
        self.owes_a_save = False  # all ranks have agreed that one has
        self.agreed = 0  # the signal that all ranks have agreed on
        self.ballot: _Ballot | None = None
        self.handlers: dict[signal.Signals, Any] = {}  # the handlers that ours replaced

    @property
    def listens(self) -> bool:
        """Also true once a signal has arrived: the stop is then under way."""
        return bool(self.handlers) or self.received > 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # only it may set a handler
            self.handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        if self.grace_seconds and self.grace is None:
            self.grace = threading.Thread(target=self._wait_for_saves, daemon=True)
            self.grace.start()
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            self.ballot = _Ballot(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        number, self.has_lost_a_save = self.received or SAVE_AGAIN * self.has_lost_a_save, False
        agreed = self.ballot.cast(number) if self.ballot else number
        if self.ballot and control.should_evaluate and agreed <= SAVE_AGAIN:  # evaluation may take long: ask again now
            agreed = max(agreed, self.ballot.cast(self.received))
        self.owes_a_save |= agreed == SAVE_AGAIN
        if agreed <= SAVE_AGAIN:
            return
        self.agreed = agreed
        control.should_training_stop, control.should_evaluate = True, False
        if args.save_strategy == SaveStrategy.NO:
            self._leave(args, state)
        control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agreed:
            self._leave(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        late = self.received  # a signal since the last step ended
        if self.ballot:
            self.ballot.cast(self.received)
            late = self.ballot.cast(0)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}
        if late and not self.agreed:
            self.agreed = late
            self._leave(args, state)
        self.end_grace()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number  # do nothing else: the main thread may hold any lock, even those of `threading`

    def _wait_for_saves(self) -> None:
        """The grace period starts with the signal; on other ranks, when they learn of it."""
        began = None
        while not self.is_over.wait(POLL_SECONDS):
            if began is None and (self.received or self.agreed):
                began = time.monotonic()
            if began is not None and time.monotonic() - began > self.grace_seconds:
                self._give_up()

    def end_grace(self) -> None:
        """Stop the grace period, also after training has failed."""
        self.is_over.set()
        if self.grace is not None:
            self.grace.join()
        self.grace = None
        self.is_over.clear()

    def _give_up(self) -> None:
        number = signal.Signals(self.agreed or self.received).name
        print(
            f"\nstopped by {number}, but not all ranks had saved within --stop_grace {self.grace_seconds:g} seconds. "
            "To continue: --resume allow.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(InterruptedRunError.exit_status)

    def _leave(self, args: Any, state: Any) -> None:
        if self.ballot:
            distributed.barrier()  # when the first rank exits, a launcher ends the others, even while they write
        self.end_grace()
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        what = f"Nothing was saved there (--save_strategy {args.save_strategy.value})."
        if checkpoint.is_dir():
            what = f"{checkpoint.name} is saved; --resume auto continues from it."
        said = f"stopped by {signal.Signals(self.agreed).name} after step {state.global_step}. {what}"
        if state.is_world_process_zero:  # printed now: closing trackers may take longer than the time left
            print(f"\n{said}", file=sys.stderr, flush=True)
        raise InterruptedRunError(said)


class _Ballot:
    """The largest number that any rank has cast, returned one step later, so that no rank waits and GPUs stay busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.told = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.arrived: torch.cuda.Event | None = None

    def cast(self, number: int) -> int:
        """Every rank must call it the same number of times."""
        if self.arrived is not None:
            self.arrived.synchronize()
        before = int(self.told)
        votes = torch.full((1,), number, dtype=torch.int32, device=self.device)  # a copy from the host would block
        distributed.all_reduce(votes, distributed.ReduceOp.MAX)
        self.told.copy_(votes, non_blocking=True)
        if self.device.type == "cuda":
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        return before


def deaf_to_sigterm(first: Callable[[int], None] | None, worker: int) -> None:
    """A data loader's `worker_init_fn`, which also calls the `first` one. deepspeed's launcher sends SIGTERM to all its
    descendants, workers first, and so does a signal to a process group: a rank that loses a worker cannot save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a worker watches its rank's process and ends with it
    if first is not None:
        first(worker)


def close_trackers(handler: Any, args: Any, state: Any, control: Any) -> None:
    """Finish the trackers of an interrupted run. Their errors are ignored, as they are not why the run ends."""
    kinds = tuple(get_reporting_integration_callbacks(args.report_to))
    for callback in handler.callbacks:
        if isinstance(callback, kinds):
            with suppress(Exception):
                callback.on_train_end(args, state, control)
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        with suppress(Exception):
            wandb.finish(exit_code=InterruptedRunError.exit_status)
