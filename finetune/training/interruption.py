"""Stop when a cluster asks for it: after the step, with a checkpoint, all ranks together."""

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

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)  # what Slurm is asked to send; what Kubernetes and the launchers send
POLL_SECONDS = 0.2


class StopOnSignal(TrainerCallback):
    """SIGUSR1 or SIGTERM to any rank ends the training: the ranks finish their step, and of several also the next, save
    a checkpoint together (none under --save_strategy no), and each raises `InterruptedRunError`. An evaluation that is
    due at that step is left out, for the time that is left is for the checkpoint; one that runs is finished first.

    The Trainer's own `enable_jit_checkpoint` heeds SIGTERM alone, and each rank by itself: a signal to one of them has
    it save while the others train on (transformers 5.23, trainer_jit_checkpoint.py).

    A rank that has not saved `grace_seconds` after the signal ends all the same, with the same status: what sent the
    signal would kill it soon, and a rank that hangs would hold the others for ever.
    """

    def __init__(self, grace_seconds: float = 0.0) -> None:
        self.grace_seconds = grace_seconds  # 0: without end
        self.grace: threading.Thread | None = None
        self.is_over = threading.Event()  # nobody's time runs any more
        self.steps = 0  # finished since the training began
        self.received = 0  # the signal, here
        self.agreed = 0  # the signal, on every rank
        self.ballot: _Ballot | None = None
        self.handlers: dict[signal.Signals, Any] = {}  # those before ours

    @property
    def listens(self) -> bool:
        """True as well once a signal has come: what it asked for is under way."""
        return bool(self.handlers) or self.received > 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # nobody else may set a handler
            self.handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        if self.grace_seconds and self.grace is None:
            self.grace = threading.Thread(target=self._wait_for_saves, daemon=True)
            self.grace.start()
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            self.ballot = _Ballot(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        self.agreed = self.ballot.cast(self.received) if self.ballot else self.received
        if self.ballot and control.should_evaluate and not self.agreed:  # which may take long: what is known this step?
            self.agreed = self.ballot.cast(self.received)
        if not self.agreed:
            return
        control.should_training_stop, control.should_evaluate = True, False
        if args.save_strategy == SaveStrategy.NO:
            self._leave(args, state)
        control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agreed:
            self._leave(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        late = self.received  # since the last step's end
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
        self.received = number  # no more: the main thread may hold any lock just now, those of `threading` too

    def _wait_for_saves(self) -> None:
        """Time runs from the signal on, and on the other ranks from when they learn of it."""
        began = None
        while not self.is_over.wait(POLL_SECONDS):
            if began is None and (self.received or self.agreed):
                began = time.monotonic()
            if began is not None and time.monotonic() - began > self.grace_seconds:
                self._give_up()

    def end_grace(self) -> None:
        """Nobody's time runs any more, be it that the training has failed."""
        self.is_over.set()
        if self.grace is not None:
            self.grace.join()
        self.grace = None
        self.is_over.clear()

    def _give_up(self) -> None:
        number = signal.Signals(self.agreed or self.received).name
        print(
            f"\nstopped by {number}, but not all ranks had saved within --stop_grace {self.grace_seconds:g} seconds. "
            "--resume auto goes on from the checkpoint before.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(InterruptedRunError.exit_status)

    def _leave(self, args: Any, state: Any) -> None:
        if self.ballot:
            distributed.barrier()  # a launcher ends all ranks when the first one ends: also one that still writes
        self.end_grace()
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        what = f"Nothing was saved there (--save_strategy {args.save_strategy.value})."
        if checkpoint.is_dir():
            what = f"{checkpoint.name} is saved; --resume auto goes on from it."
        said = f"stopped by {signal.Signals(self.agreed).name} after step {state.global_step}. {what}"
        if state.is_world_process_zero:  # now, for what is still to be closed may take longer than there is time
            print(f"\n{said}", file=sys.stderr, flush=True)
        raise InterruptedRunError(said)


class _Ballot:
    """The largest number that any rank has cast, told a step later: nobody waits for it, and a GPU stays busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.told = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.arrived: torch.cuda.Event | None = None

    def cast(self, number: int) -> int:
        """Every rank must call it, equally often."""
        if self.arrived is not None:
            self.arrived.synchronize()
        before = int(self.told)
        votes = torch.full((1,), number, dtype=torch.int32, device=self.device)  # a copy from the host would wait
        distributed.all_reduce(votes, distributed.ReduceOp.MAX)
        self.told.copy_(votes, non_blocking=True)
        if self.device.type == "cuda":
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        return before


def deaf_to_sigterm(first: Callable[[int], None] | None, worker: int) -> None:
    """A data loader's `worker_init_fn`, after another one. deepspeed's launcher sends SIGTERM to all below it, workers
    first, and so does whoever signals a process group: without its worker a rank fails where it should save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its rank, whose process it watches
    if first is not None:
        first(worker)


def close_trackers(handler: Any, args: Any, state: Any, control: Any) -> None:
    """What an interrupted run still has to tell them. What they raise is not why the run ends."""
    kinds = tuple(get_reporting_integration_callbacks(args.report_to))
    for callback in handler.callbacks:
        if isinstance(callback, kinds):
            with suppress(Exception):
                callback.on_train_end(args, state, control)
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        with suppress(Exception):
            wandb.finish(exit_code=InterruptedRunError.exit_status)
