"""Asynchronous saving, the training rank's side: it copies what it would write, and a separate process writes the copy
(finetune.training.checkpoints.writer_process)."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from finetune.errors import RequestError, first_line
from finetune.run.environment import environment_of_child
from finetune.run.files import UNFINISHED
from finetune.training.checkpoints.copies import (
    Memory,
    OtherDeviceError,
    Storages,
    copied,
    copied_weights,
    shared_weights,
)
from finetune.training.checkpoints.learned import Learned
from finetune.training.checkpoints.writer_process import Copy, Job, Mark, Report, main, mark_of, report_left_by
from finetune.training.checkpoints.writing import OtherRankError, folder_of, outer_of, rank

MEANT_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # which end the process
PATIENCE_SECONDS = 60.0  # after which a rank that waits for its writer says so
STATES = {"T": "It is stopped: continue it with kill -CONT.", "D": "It waits for the disk."}  # proc(5)
ENDING_SECONDS = 60.0  # how long a failing rank waits for the others' parts, once its own is on disk


class Writer:
    """This rank's writer process and the memory they share. One checkpoint at a time: `begin`, `keep` for each file,
    `hand_over`, `go`, and then `wait` for the process's report."""

    def __init__(self) -> None:
        self.memory = Memory(os.memfd_create("finetune-checkpoint"))
        self.storages = Storages(self.memory)  # those of the live weights, in the current save
        self.learned = Learned()
        self.early: str | None = None  # what cannot be copied, and why
        self.folder: Path | None = None  # the folder that the ranks are writing to
        self.outer: Path | None = None  # exists until the most recent checkpoint is in place
        self.copies: list[Copy] = []
        self.reports: list[Report] = []  # on the current job
        self.mark: Mark | None = None  # of the folder that the ranks have last written to
        self.job: Job | None = None  # that was handed over
        self.message: tuple[Any, ...] = ()  # what it is sent for the current job
        self.sent = False  # whether it was: if another rank fails before, it never is
        self.start()

    def start(self) -> None:
        """Start the process, or restart it when it has died between two saves."""
        own, other = Pipe()
        words = [str(number) for number in (other.fileno(), self.memory.handle, os.getpid())]
        # It needs no GPU, and must not log which accelerator it finds.
        env = environment_of_child() | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", f"from {main.__module__} import main; main()", *words]
        # It inherits what is blocked: a signal to the whole group may come while it still imports torch.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_RANKS)
        try:
            self.process = subprocess.Popen(command, env=env, pass_fds=(other.fileno(), self.memory.handle))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()
        self.connection: Connection = own

    def begin(self, place: Path, ahead: Iterable[torch.Tensor] = ()) -> None:
        if self.process.poll() is not None:
            self.start()
        self.memory.clear()
        self.storages = Storages(self.memory)
        self.folder, self.outer, self.copies, self.reports = folder_of(place), outer_of(place), [], []
        self.sent, self.mark, self.job = False, mark_of(self.folder), None
        for tensor in ahead:
            self.storages.put(tensor.untyped_storage())
        self.storages.begin()

    @property
    def names(self) -> list[str]:
        return [copy.name for copy in self.copies]

    def keep(self, path: str | Path, content: Any, is_zip: bool = True) -> bool:
        """Begin to copy what torch.save would write to `path`; until the save is handed over, nothing may change its
        tensors. False if the caller must write it: no save is in progress, or the content has classes or devices that
        only this process knows."""
        if self.folder is None or not Path(path).is_relative_to(self.folder):
            return False
        try:
            pickled = copied(content, Storages(self.memory, self.storages))
        except OtherDeviceError:
            self.early = f"{Path(path).name}: it has tensors of a class of their own on a GPU. Use a plain --optim."
            return False
        if b"__main__" in pickled:
            self.early = (
                f"{Path(path).name}: it has objects whose class is in the script itself, which the process that writes "
                "cannot import. Move the class to a module."
            )
            return False
        self.copies.append(Copy(str(Path(path).relative_to(self.folder)), pickled, is_zip=is_zip))
        return True

    def keep_model(
        self,
        weights: dict[str, torch.Tensor],
        settings: Callable[[], bytes],
        is_live: bool,
        write: Callable[[Path], None],
    ) -> None:
        """Copy the `weights` that `write` would write to the checkpoint, and the files beside them, which depend on the
        `settings`; the first time, let `write` write them. `is_live`: the weights are the model's own tensors, which do
        not change before the save is handed over."""
        assert self.folder is not None
        assert self.outer is not None
        known = self.learned.of(weights, self._pickled(settings))
        if known is None:
            alone = self.outer / "model"  # other ranks already write into the folder
            write(alone)
            # By now transformers has completed the config.
            if why := self.learned.look(alone, weights, self._pickled(settings)):
                self.early = f"the model: {why}."
            for path in alone.iterdir():
                path.rename(self.folder / path.name)
            alone.rmdir()
            return
        self.copies += [Copy(name, content, is_file=True) for name, content in known.others.items()]
        saved = {name: weights[name] for name in known.names}
        places = shared_weights(saved, self.storages) if is_live else copied_weights(saved.items(), self.memory)
        self.copies.append(Copy(known.file, places, known.metadata))

    def _pickled(self, settings: Callable[[], bytes]) -> bytes | None:
        try:
            return settings()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.early = (
                f"the model: its config or the training arguments cannot be pickled ({first_line(error)}). Define "
                "their classes and functions at the top level of a module."
            )
            return None

    def keep_weights(self, path: Path, weights: Iterable[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> None:
        """Copy what safetensors would write to `path`, a file of the checkpoint that is being saved."""
        assert self.folder is not None
        self.copies.append(Copy(str(path.relative_to(self.folder)), copied_weights(weights, self.memory), metadata))

    def hand_over(self, job: Job) -> None:
        """Describe the job to the process, once all is copied."""
        self.memory.wait()
        self.folder, self.job, self.storages = None, job, Storages(self.memory)
        words = bytearray(pickle.dumps(replace(job, copies=tuple(self.copies))))
        place = self.memory.put(torch.frombuffer(words, dtype=torch.uint8))  # too large for a pipe's buffer
        self.message = place, len(words), tuple(self.memory.segments)

    def go(self) -> None:
        """Let the process begin what was handed over. If it has died, `look` says so."""
        with suppress(OSError):
            self.connection.send(self.message)
        self.sent = True  # not before: after a Ctrl-C in between, `close` would wait for a job that nobody has

    def look(self) -> str | None:
        """The error of the checkpoint in progress, if any. Does not wait for the process; does itself what a killed one
        left undone after its rename, such as deleting older checkpoints."""
        with suppress(EOFError, OSError):
            while self.connection.poll():
                self.reports.append(self.connection.recv())
        failed = next((report for report in self.reports if report.error), None)
        if failed is not None:
            return failed.error
        status = self.process.poll()
        if status is None or self._has_all():
            return None
        with suppress(OSError, RequestError):  # of a disk that fails now, or of a manifest that somebody changes
            if self.job is not None and (report := report_left_by(self.job, self.mark)):
                self.reports.append(report)
                return None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the process that writes it {how}"

    def is_done(self) -> bool:
        """Whether this process has finished its part of the current job."""
        return self.look() is None and self._has_all()

    def _has_all(self) -> bool:
        """Whether the process has nothing more to report on the current job."""
        commits = self.job is not None and self.job.keeper is not None
        return any(report.is_whole or not commits for report in self.reports)

    def wait(self, whole: bool) -> Report:
        """Wait until this part is on disk, or the `whole` checkpoint in place. Raises OtherRankError or OSError."""
        late = time.monotonic() + PATIENCE_SECONDS
        while True:
            error = self.look()
            found = [report for report in self.reports if report.is_whole or not whole]
            if error is not None:
                number = next((report.errno for report in self.reports if report.error), None)
                raise OSError(number, os.strerror(number)) if number else OtherRankError(error)
            if found:
                return found[-1]
            if time.monotonic() > late:
                late = math.inf
                print(f"note: rank {rank()} has waited {PATIENCE_SECONDS:g} s for {self._at_work()}", flush=True)
            with suppress(EOFError, OSError):
                self.connection.poll(0.2)

    def _at_work(self) -> str:
        """What the process writes, and whether it stands still."""
        place = self.outer.name.removeprefix(UNFINISHED) if self.outer else "a checkpoint"
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = ""
        return f"{place}, which process {self.process.pid} writes. {STATES.get(state, 'It is at work.')}"

    def close(self, gives_time: bool = False) -> None:
        """End the process; with `gives_time`, first let the checkpoint in progress finish. This rank stays alive until
        then, because a launcher ends all ranks when one ends; the wait is limited, because the others may be gone."""
        end = math.inf
        while gives_time and self.sent and self.look() is None and time.monotonic() < end:
            assert self.outer is not None
            if self.is_done() and not self.outer.exists():
                break
            if self.reports and end == math.inf:
                end = time.monotonic() + ENDING_SECONDS
            time.sleep(0.05)
        self.memory.wait()
        self.memory.pool.shutdown()
        self.connection.close()
        self.process.kill()
        self.process.wait()
        os.close(self.memory.handle)
