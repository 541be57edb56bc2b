"""Every rank sends a heartbeat once a second; the run ends when one stops coming.

Heartbeats go through a separate TCPStore on rank 0's host (torch.distributed, public API), from a thread, so that they
continue while the main thread waits in a collective that will never end."""

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
from finetune.training.guards.flight import Joined, Recorder
from finetune.training.guards.movement import Movement
from finetune.training.guards.verdict import SILENT_SECONDS, Heartbeat, Position, Verdict, judge, position_of

BEAT_SECONDS = 1.0
SUSPENDED_SECONDS = 3 * BEAT_SECONDS  # a longer lap means that the process (a suspended job) or its host was stopped
NEAR_SECONDS = 3 * BEAT_SECONDS  # before a verdict: the flight recorder is read, and its end sent
READ_AGAIN_SECONDS = 10.0  # a backward pass joins collectives while the main thread waits for it
STORE_SECONDS = 5.0  # how long a rank waits for the store at its start and at its end
QUIET_RANKS_WAIT_SECONDS = 5.0  # so that the reporting rank has printed before a launcher ends it
HEARD_SECONDS = 1.5 * BEAT_SECONDS  # until the others have read that a rank has left
HURRIED_SECONDS = 6.0  # once a transfer has failed, some rank is gone: no need to be patient
VERDICT = "verdict"
BLAME = "--hang_blame True would end it; --ddp_timeout does in any case."
MEND = "--resume allow continues from the newest checkpoint, if there is one."


class Pulse(threading.Thread):
    """`pids` are the processes of this host by rank, which this one may kill. The main thread calls `tick` as it makes
    progress; this thread watches what it does in between.

    Rank 0 judges, because only it reads all heartbeats; the others read rank 0's heartbeat, its verdict, and which
    ranks of their host have left. If rank 0 itself fails, they notice; the lowest rank still alive reports it.

    `has_stepped` returns whether this rank has finished a step since it started: waiting before that (for a tracker,
    or for another rank's compilation lock) is not a fault. A verdict by stillness ends the run only if it `blames`;
    otherwise it is a warning.
    """

    def __init__(
        self,
        store: Any,
        limit: float,
        pids: dict[int, int],
        name_of: Callable[[int], str],
        has_stepped: Callable[[], bool] = lambda: True,
        blames: bool = False,
    ) -> None:
        super().__init__(daemon=True)
        self.store, self.limit, self.pids, self.name_of = store, limit, pids, name_of
        self.has_stepped, self.blames = has_stepped, blames
        self.warned_of: tuple[int, ...] | None = None  # ranks that stand still, since the last warning
        self.left: set[int] = set()  # ranks of this host that are known to have ended by themselves
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.others = range(1, self.world_size) if self.rank == 0 else range(1)
        self.main = threading.main_thread().ident or 0
        self.leaving = threading.Event()
        self.ticks = 0
        self.told: Verdict | None = None  # rank 0's
        self.has_spoken = False  # whether a verdict was reached: what is seen from now on is a consequence
        self.movement = Movement(self.world_size, store.port)
        self.recorder = Recorder(self.movement.watchers)
        self.joined: tuple[Joined, ...] = ()
        self.read_at = -READ_AGAIN_SECONDS
        self.own = Heartbeat(self.rank, 0, Position("", "", ""), 0.0, 0.0)
        self.since = self.idle_since = time.monotonic()
        self.seen: dict[int, Heartbeat] = {}
        self.seen_at = dict.fromkeys(self.others, time.monotonic())

    def tick(self) -> None:
        self.ticks += 1

    def hurry(self) -> None:
        """A transfer has failed in the main thread: find out soon which rank is gone."""
        self.limit = min(self.limit, HURRIED_SECONDS)

    def leave(self, linger_seconds: float = 0.0) -> None:
        """Stop: from here on, nobody waits for this rank. Joining takes up to 10 s; then it waits `linger_seconds`."""
        self.leaving.set()
        self.join(2 * STORE_SECONDS)
        time.sleep(linger_seconds)

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
            except Exception:  # its position is unknown, but without a heartbeat it would be taken for dead
                self.own = replace(self.own, number=self.own.number + 1)
            verdict = None if was_suspended and not self.told else self._verdict()
            if verdict:
                self._end(verdict)
        talk.join(STORE_SECONDS)

    def _forgive(self, seconds: float) -> None:
        """Whether or not the others were suspended too, the pause does not count against them."""
        for rank in self.others:
            self.seen_at[rank] += seconds
        self.since, self.idle_since = self.since + seconds, self.idle_since + seconds
        self.movement.forget()

    def _talk(self) -> None:
        """Runs in a separate thread: a store whose host has stopped never answers, timeout or not (torch 2.13,
        TCPStore.check). The age of rank 0's last heartbeat tells for how long."""
        self.movement.watchers.add(threading.get_native_id())
        while not self.leaving.wait(BEAT_SECONDS):
            with suppress(Exception):  # one heartbeat is lost; if all are, the other ranks notice
                self._exchange()
        with suppress(Exception):
            self.own = replace(self.own, number=self.own.number + 1, has_left=True)
            self._tell()

    def _look(self) -> None:
        now, found = time.monotonic(), position_of(self.main)
        found = replace(found, key=f"{self.ticks} {found.key}")
        if found.key != self.own.position.key:
            self.since = self.idle_since = now
            self.joined, self.read_at = (), -READ_AGAIN_SECONDS
            self.movement.forget()
        elif self.movement.since_last():
            self.idle_since = now
        still, idle = now - self.since, now - self.idle_since
        if still >= min(self.limit, SILENT_SECONDS) - NEAR_SECONDS and now - self.read_at >= READ_AGAIN_SECONDS:
            self.read_at = now
            with suppress(Exception):  # private to torch: the message does without it
                self.joined = self.recorder.read()
        number, has_stepped = self.own.number + 1, self.has_stepped()
        self.own = Heartbeat(self.rank, number, found, still, idle, has_stepped=has_stepped, joined=self.joined)

    def _tell(self) -> None:
        self.store.set(f"rank {self.rank}", json.dumps(asdict(self.own)))

    def _exchange(self) -> None:
        self._tell()
        for rank in sorted({*self.others, *self.pids} - {self.rank}):
            if not self.store.check([f"rank {rank}"]):
                continue
            content = json.loads(self.store.get(f"rank {rank}"))
            joined = tuple(Joined(**one) for one in content["joined"])
            beat = Heartbeat(**{**content, "position": Position(**content["position"]), "joined": joined})
            if beat.has_left:
                self.left.add(rank)
            if rank in self.others and (rank not in self.seen or beat.number != self.seen[rank].number):
                self.seen[rank], self.seen_at[rank] = beat, time.monotonic()
        if self.rank and self.store.check([VERDICT]):
            self.told = Verdict(tuple(json.loads(self.store.get(VERDICT))), "")

    def _verdict(self) -> Verdict | None:
        if self.told:
            return self.told
        now = time.monotonic()
        ages = {rank: now - at for rank, at in self.seen_at.items()}
        known = self.seen if self.rank else {**self.seen, 0: self.own}  # other ranks judge only whether rank 0 lives
        verdict = judge(known, ages, self.limit, self.name_of)
        if verdict is None or not verdict.by_stillness or self.blames:
            self.warned_of = None
            return verdict
        if self.warned_of != verdict.ranks:
            print(f"\nwarning: {verdict.said}. The run keeps waiting. {BLAME}", file=sys.stderr, flush=True)
            self.warned_of = verdict.ranks
        return None

    def _end(self, verdict: Verdict) -> None:
        try:
            self._speak_and_end_others(verdict)
        finally:
            os._exit(1)

    def _speak_and_end_others(self, verdict: Verdict) -> None:
        self.has_spoken = True
        if verdict.said:
            if self.rank:
                time.sleep(min(self.rank - 1, QUIET_RANKS_WAIT_SECONDS))  # the lowest rank alive prints first
            print(f"\nerror: {verdict.said}. The run cannot go on. {MEND}", file=sys.stderr, flush=True)
            if not self.rank:
                telling = threading.Thread(target=self._tell_verdict, args=(verdict,), daemon=True)
                telling.start()  # a store that no longer answers must not block this process
                telling.join(STORE_SECONDS)
        for rank in verdict.ranks:  # a stopped process reacts to no other signal, and a launcher would wait for it
            if rank in self.pids and rank != self.rank:
                with suppress(OSError):
                    os.kill(self.pids[rank], signal.SIGKILL)
        if not verdict.said or not self.rank:
            time.sleep(QUIET_RANKS_WAIT_SECONDS if self.rank else 2 * BEAT_SECONDS)  # the others need rank 0's store

    def _tell_verdict(self, verdict: Verdict) -> None:
        with suppress(Exception):
            self.store.set(VERDICT, json.dumps(verdict.ranks))


def begin_pulse(
    limit: float, blames: bool, pids: dict[int, int], name_of: Callable[[int], str], has_stepped: Callable[[], bool]
) -> Pulse | None:
    """Start it; all ranks call it together. None if it is off (0), or, with a warning, if some rank cannot reach rank
    0's store: a port chosen by the system must be open between the hosts, as for gloo and NCCL."""
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
            print(f"warning: rank {reach.index(False)} cannot reach {address}:{port}: hangs will not be detected.")
        return None
    pulse = Pulse(store, limit, pids, name_of, has_stepped, blames)
    pulse.start()
    return pulse
