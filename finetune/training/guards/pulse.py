"""A sign of life from every rank once a second, and the end of the run where one fails to come.

Over a TCPStore of our own on rank 0's host (torch.distributed, public), from a thread: so that it goes on while the
main thread waits in a collective that will never end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch import distributed

from finetune.training.checkpoints.writing import every, of_first
from finetune.training.guards.movement import Movement
from finetune.training.guards.verdict import Heartbeat, Position, Verdict, judge, position_of

BEAT_SECONDS = 1.0
SUSPENDED_SECONDS = 3 * BEAT_SECONDS  # a lap so long: this process was stopped (a cluster suspends a job), or its host
STORE_SECONDS = 5.0  # that a rank waits for the store at its beginning and at its end
QUIET_RANKS_WAIT_SECONDS = 5.0  # so that the rank that speaks has spoken before a launcher ends it
HURRIED_SECONDS = 6.0  # once a transfer has failed, somebody is gone: no need to be patient
VERDICT = "verdict"
MEND = "Where a checkpoint was saved, --resume auto goes on from it."


class Pulse(threading.Thread):
    """`pids` are the processes of this host by rank, which this one may end. The main thread calls `tick` as it gets
    on with its work; what it does in between is looked at from here.

    Rank 0 judges, for it alone reads what all others tell; these read only rank 0's signs and its verdict. Where rank 0
    itself fails, the others find that by themselves, and the lowest of those that live speaks.

    `has_stepped` tells whether this rank has finished a step since it began: what it waits for before (a tracker, a
    lock of who compiles) is no fault.
    """

    def __init__(
        self,
        store: Any,
        limit: float,
        pids: dict[int, int],
        name_of: Callable[[int], str],
        has_stepped: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(daemon=True)
        self.store, self.limit, self.pids, self.name_of = store, limit, pids, name_of
        self.has_stepped = has_stepped
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.others = range(1, self.world_size) if self.rank == 0 else range(1)
        self.main = threading.main_thread().ident or 0
        self.leaving = threading.Event()
        self.ticks = 0
        self.told: Verdict | None = None  # rank 0's
        self.has_spoken = False  # here or on another rank: what else is seen now comes of it
        self.movement = Movement(self.world_size, store.port)
        self.own = Heartbeat(self.rank, 0, Position("", "", ""), 0.0, 0.0)
        self.since = self.idle_since = time.monotonic()
        self.seen: dict[int, Heartbeat] = {}
        self.seen_at = dict.fromkeys(self.others, time.monotonic())

    def tick(self) -> None:
        self.ticks += 1

    def hurry(self) -> None:
        """A transfer has failed in the main thread: who is gone is to be said soon."""
        self.limit = min(self.limit, HURRIED_SECONDS)

    def leave(self) -> None:
        """The main thread goes where nobody waits for this rank any more."""
        self.leaving.set()
        self.join(2 * STORE_SECONDS)

    def run(self) -> None:
        self.movement.watchers.add(threading.get_native_id())
        talk = threading.Thread(target=self._talk, daemon=True)
        talk.start()
        lap = time.monotonic()
        while not self.leaving.wait(BEAT_SECONDS):
            began, lap = lap, time.monotonic()
            was_suspended = lap - began > SUSPENDED_SECONDS
            if was_suspended:
                self._forgive(lap - began)
            try:
                self._look()
            except Exception:  # what it does cannot be told; but it lives, and would be taken for dead
                self.own = replace(self.own, number=self.own.number + 1)
            verdict = None if was_suspended and not self.told else self._verdict()
            if verdict:
                self._end(verdict)
        talk.join(STORE_SECONDS)

    def _forgive(self, seconds: float) -> None:
        """The others were suspended as well, or were not: they get as long again as if this had not been."""
        for rank in self.others:
            self.seen_at[rank] += seconds
        self.since, self.idle_since = self.since + seconds, self.idle_since + seconds
        self.movement.forget()

    def _talk(self) -> None:
        """In a thread of its own: a store whose host has stopped answers never, time-out or not (torch 2.13,
        TCPStore.check). The age of rank 0's last sign tells for how long."""
        self.movement.watchers.add(threading.get_native_id())
        while not self.leaving.wait(BEAT_SECONDS):
            with suppress(Exception):  # one beat is lost, whatever it was; where all are, the others say so
                self._exchange()
        with suppress(Exception):
            self.own = replace(self.own, number=self.own.number + 1, has_left=True)
            self._tell()

    def _look(self) -> None:
        now, found = time.monotonic(), position_of(self.main)
        found = replace(found, key=f"{self.ticks} {found.key}")
        if found.key != self.own.position.key:
            self.since = self.idle_since = now
            self.movement.forget()
        elif self.movement.since_last():
            self.idle_since = now
        still, idle = now - self.since, now - self.idle_since
        self.own = Heartbeat(self.rank, self.own.number + 1, found, still, idle, has_stepped=self.has_stepped())

    def _tell(self) -> None:
        self.store.set(f"rank {self.rank}", json.dumps(asdict(self.own)))

    def _exchange(self) -> None:
        self._tell()
        for rank in self.others:
            if not self.store.check([f"rank {rank}"]):
                continue
            content = json.loads(self.store.get(f"rank {rank}"))
            beat = Heartbeat(**{**content, "position": Position(**content["position"])})
            if rank not in self.seen or beat.number != self.seen[rank].number:
                self.seen[rank], self.seen_at[rank] = beat, time.monotonic()
        if self.rank and self.store.check([VERDICT]):
            self.told = Verdict(tuple(json.loads(self.store.get(VERDICT))), "")

    def _verdict(self) -> Verdict | None:
        if self.told:
            return self.told
        now = time.monotonic()
        ages = {rank: now - at for rank, at in self.seen_at.items()}
        known = self.seen if self.rank else {**self.seen, 0: self.own}  # others judge only whether rank 0 is there
        return judge(known, ages, self.limit, self.name_of)

    def _end(self, verdict: Verdict) -> None:
        try:
            self._speak_and_end_others(verdict)
        finally:
            os._exit(1)

    def _speak_and_end_others(self, verdict: Verdict) -> None:
        self.has_spoken = True
        if verdict.said:
            if self.rank:
                time.sleep(min(self.rank - 1, QUIET_RANKS_WAIT_SECONDS))  # the lowest that lives speaks
            print(f"\nerror: {verdict.said}. The run cannot go on. {MEND}", file=sys.stderr, flush=True)
            if not self.rank:
                telling = threading.Thread(target=self._tell_verdict, args=(verdict,), daemon=True)
                telling.start()  # a store that answers no more must not keep this process
                telling.join(STORE_SECONDS)
        for rank in verdict.ranks:  # a stopped process heeds no other signal, and a launcher would wait for it
            if rank in self.pids and rank != self.rank:
                with suppress(OSError):
                    os.kill(self.pids[rank], signal.SIGKILL)
        if not verdict.said or not self.rank:
            time.sleep(QUIET_RANKS_WAIT_SECONDS if self.rank else 2 * BEAT_SECONDS)  # while rank 0's store is needed

    def _tell_verdict(self, verdict: Verdict) -> None:
        with suppress(Exception):
            self.store.set(VERDICT, json.dumps(verdict.ranks))


def begin_pulse(
    limit: float, pids: dict[int, int], name_of: Callable[[int], str], has_stepped: Callable[[], bool]
) -> Pulse | None:
    """All ranks together. None where it is switched off (0), or where some rank does not reach rank 0's store, which is
    said: a port that the system chooses must be open between the hosts, as for gloo and NCCL."""
    if not limit or distributed.get_world_size() == 1:
        return None
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    timeout = timedelta(seconds=STORE_SECONDS)
    is_first = distributed.get_rank() == 0
    store: Any = None
    if is_first:
        store = distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port = of_first(store.port if is_first else None)
    if not is_first:
        with suppress(distributed.DistError):
            store = distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    reach = every(store is not None)
    if not all(reach):
        if is_first:
            print(f"warning: rank {reach.index(False)} does not reach {address}:{port}: a hang is not noticed.")
        return None
    pulse = Pulse(store, limit, pids, name_of, has_stepped)
    pulse.start()
    return pulse
