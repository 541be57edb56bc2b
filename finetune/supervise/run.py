"""Attempt after attempt, until the run is done or trying again makes no sense. Which attempt a supervisor begins or
joins, and with how many hosts, follows from the log, which is the same for all hosts."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.errors import INTERRUPTED
from finetune.run import supervised
from finetune.supervise.attempt import Requested, end_of, newest_step, run_attempt, signal_in
from finetune.supervise.command import Command, read_command
from finetune.supervise.decide import TRY_AGAIN, Judge, Verdict
from finetune.training.checkpoints.lock import gone, keep_locked, lock_run_folder

KEPT_ATTEMPTS = 2
LOOK_SECONDS = 1.0


def supervise(words: Sequence[str], max_restarts: int) -> int:
    """Run the command, and again after each failure from which the run can continue; returns the exit status of the
    last attempt. Raises RequestError for a command that cannot be supervised, or if another process supervises it."""
    command = read_command(words)
    place = command.home
    if command.hosts:  # one supervisor on each host; otherwise one in all
        place = command.home / f"host-{command.address or socket.gethostname()}"
    place.mkdir(parents=True, exist_ok=True)
    if note := lock_run_folder(place, "finetune supervise", run_folder=command.folder):
        print(note, file=sys.stderr, flush=True)
    return _Supervisor(command, place, max_restarts).run()


class _Supervisor:
    def __init__(self, command: Command, place: Path, max_restarts: int) -> None:
        """`place` has the supervisor's lock."""
        self.command, self.home, self.place = command, command.home, place
        self.requested = Requested()
        self.shown = len(supervised.told(self.home))  # lines of the log that are older, or printed
        self.looked_at = 0.0
        self.judge = Judge(max_restarts, command.hosts[0] if command.hosts else 1, newest_step(command.folder))

    def run(self) -> int:
        number = self._next()
        while True:
            verdict = self._attempt(self.home / f"attempt-{number}")
            if isinstance(verdict, int):
                return verdict
            self.requested.pause(verdict.pause_seconds or 0.0)
            if (status := self._told_to_stop(number)) is not None:
                return status
            number = max(number + 1, self._next())
            if self.judge.failed_in is not None:
                self._note_failure(self.home / f"attempt-{number}", self.judge.failed_in)

    def _attempt(self, attempt: Path) -> Verdict | int:
        """One attempt; the exit status if it was the last. Raises RunError if the run folder is gone."""
        if not os.path.exists(self.command.folder):
            raise gone(self.command.folder)
        attempt.mkdir(parents=True, exist_ok=True)
        keep_locked(self.place)
        number = supervised.number_of(attempt)
        self._forget_before(number)
        self._tell("attempt", f"attempt {number} starts", attempt=number)
        began = time.monotonic()
        words = self.command.words(attempt, self._fewest_hosts(), most_hosts_of(self.home, number))
        for_ranks = supervised.environment_of(attempt, self.command.digest)
        launcher_status = run_attempt(words, for_ranks, self.requested, self._look)
        if launcher_status and self.command.by_torchrun:
            print("supervise: a traceback above is torchrun's own, and says only that a rank failed", file=sys.stderr)
        end = end_of(attempt, launcher_status, self.command)
        if end.status == 0:
            return self._stop(0, number, "the run is done")
        if (status := self._told_to_stop(number)) is not None:
            return status
        verdict = self.judge.judge(end)
        where = f" in step {end.step}" if end.step is not None else ""
        how = f"ended with status {end.status}{signal_in(end.status)}{where}"
        said = f"attempt {number} {how}, after {time.monotonic() - began:.0f} s"
        facts: dict[str, Any] = {
            "attempt": number,
            "status": end.status,
            "step": end.step,
            "newest_checkpoint": end.newest,
            "launcher_status": launcher_status,
            "most_hosts": verdict.most_hosts,  # for all hosts that enter the next attempt, also those that come later
        }
        self._tell(supervised.FAILED, f"{said}: {verdict.said}", **facts)
        if verdict.pause_seconds is not None:
            return verdict
        for_all = end.status not in (TRY_AGAIN, INTERRUPTED)
        facts = {"step": end.step, "samples": end.samples, "ahead": end.ahead, "for_all": for_all}
        return self._stop(end.status, number, verdict.said, **facts)

    def _next(self) -> int:
        return next_attempt(self.home, may_join=self.command.hosts is not None)

    def _fewest_hosts(self) -> int | None:
        """None: as the command says."""
        if self.command.hosts is None:
            return None
        needs_all = needs_all_hosts(self.home, self.command.digest, newest_step(self.command.folder) > 0)
        return self.command.hosts[1] if needs_all else None

    def _note_failure(self, attempt: Path, step: int) -> None:
        """For the ranks of the next attempt, which then write down the samples of that step."""
        with suppress(OSError):
            attempt.mkdir(exist_ok=True)
            (attempt / supervised.FAILED_AT).write_text(str(step))

    def _forget_before(self, number: int) -> None:
        for old in supervised.attempts_in(self.home):
            if supervised.number_of(old) <= number - KEPT_ATTEMPTS:
                shutil.rmtree(old, ignore_errors=True)

    def _told_to_stop(self, number: int) -> int | None:
        """The exit status, if a signal asks this supervisor to stop, or if another host found in this attempt, or in
        one that this host has missed, that trying again makes no sense."""
        if self.requested.number:
            return self._stop(self.requested.status, number, "a signal asked for it")
        stops = [one for one in supervised.told(self.home) if one["event"] == supervised.STOPPED]
        other: Mapping[str, Any] | None = next(
            (one for one in stops if one.get("attempt", 0) >= number and one.get("for_all")), None
        )
        return None if other is None else self._stop(int(other["status"]), number, f"as {other['host']} did")

    def _stop(self, status: int, number: int, said: str, **facts: Any) -> int:
        said = f"stopped with status {status}: {said}"
        self._tell(supervised.STOPPED, said, status=status, attempt=number, **facts)
        return status

    def _tell(self, event: str, said: str, **facts: Any) -> None:
        supervised.tell(self.home, event, said, **facts)
        self._show()

    def _look(self) -> None:
        if time.monotonic() - self.looked_at > LOOK_SECONDS:
            self.looked_at = time.monotonic()
            self._show()

    def _show(self) -> None:
        """Print what has been added to the log, by whichever host."""
        records = supervised.told(self.home)
        for one in records[self.shown :]:
            at = time.strftime("%H:%M:%S", time.localtime(one.get("time", 0)))
            print(f"supervise: {at} {one.get('host')}: {one.get('said')}", file=sys.stderr, flush=True)
        self.shown = max(self.shown, len(records))  # fewer if the log cannot be read just now


def next_attempt(home: Path, *, may_join: bool) -> int:
    """The number of the newest attempt if other hosts may be in it and this one may join them, else of a new one."""
    every, ends = supervised.attempts_in(home), (supervised.FAILED, supervised.STOPPED)
    newest = supervised.number_of(every[-1]) if every else 0
    is_over = any(one["event"] in ends and one.get("attempt") == newest for one in supervised.told(home))
    return newest if newest and may_join and not is_over else newest + 1


def most_hosts_of(home: Path, number: int) -> int | None:
    """The hosts on which this attempt is to run at most, because the global batch did not divide among those of the
    attempt before; None: as many as the command allows."""
    before = [one for one in supervised.told(home) if one["event"] == supervised.FAILED]
    return min((one["most_hosts"] for one in before if one.get("attempt") == number - 1 and one.get("most_hosts")),
               default=None)  # fmt: skip


def needs_all_hosts(home: Path, digest: str, has_checkpoint: bool) -> bool:
    """Whether a run begins: all hosts define its global batch. A checkpoint keeps that of the earlier starts; without
    any, it is that of the earlier starts of the same command, which has this digest."""
    trained = [one for one in supervised.told(home) if one["event"] == supervised.TRAINING]
    return not any(has_checkpoint or one.get("command") == digest for one in trained)
