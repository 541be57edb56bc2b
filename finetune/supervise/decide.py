"""Whether a run that has ended is started again, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import INTERRUPTED, BusyError, RequestError

TRY_AGAIN, WRONG_REQUEST = BusyError.exit_status, RequestError.exit_status
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
MOST_NAMED = 16  # samples


@dataclass(frozen=True)
class End:
    """How an attempt ended. `step` is the one that it was in, None if it was in none. `newest` is the step of the
    newest checkpoint, 0 without any. `samples` are those of `step` if it had failed before; None if unknown (a stream).
    `ahead` are those that were read ahead, if it failed while reading. `most_hosts` is the number of hosts among which
    the global batch would divide, if it did not."""

    status: int
    step: int | None
    newest: int
    samples: Sequence[int] | None = None
    ahead: Sequence[int] = ()
    most_hosts: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Start again after `pause_seconds` (None: stop), on at most `most_hosts`; `said` is the reason."""

    said: str
    pause_seconds: float | None = None
    most_hosts: int | None = None


class Judge:
    """Counts restarts in a row that brought no new checkpoint: a run of weeks may fail often, if it moves on."""

    def __init__(self, max_restarts: int, fewest_hosts: int, newest: int) -> None:
        self.max_restarts, self.fewest_hosts = max_restarts, fewest_hosts
        self.newest, self.in_vain = newest, 0
        self.failed_in: int | None = None  # the step in which the last attempt failed

    def judge(self, end: End) -> Verdict:
        if end.newest > self.newest:
            self.newest, self.in_vain = end.newest, 0
        before, self.failed_in = self.failed_in, None
        if end.status == WRONG_REQUEST and (end.most_hosts or 0) >= self.fewest_hosts:
            return self._again(f"the global batch does not divide among so many hosts, but among {end.most_hosts}",
                               end.most_hosts)  # fmt: skip
        if end.status == WRONG_REQUEST:
            return Verdict("the request is wrong, and would be the next time")
        if end.status == INTERRUPTED:
            return Verdict("it was interrupted")
        if end.status != TRY_AGAIN:
            self.failed_in = end.step
            if end.step is not None and end.step == before:
                ahead = f"; or while {_named(end.ahead)} were read ahead" if end.ahead else ""
                return Verdict(f"step {end.step} has failed twice, with the same samples: {_named(end.samples)}{ahead}")
        return self._again("the run asks to be tried again" if end.status == TRY_AGAIN else "the run failed")

    def _again(self, why: str, most_hosts: int | None = None) -> Verdict:
        if self.in_vain >= self.max_restarts:
            return Verdict(f"{why}, and {self.in_vain} restart(s) in a row have brought no new checkpoint "
                           "(--max_restarts)")  # fmt: skip
        pause = min(FIRST_PAUSE_SECONDS * 2**self.in_vain, LONGEST_PAUSE_SECONDS)
        self.in_vain += 1
        return Verdict(why, pause, most_hosts)


def _named(samples: Sequence[int] | None) -> str:
    if samples is None:
        return "not known (a stream, or it failed too early)"
    rest = len(samples) - MOST_NAMED
    return f"rows {', '.join(map(str, samples[:MOST_NAMED]))}" + f" and {rest} more" * (rest > 0)
