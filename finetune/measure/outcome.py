"""How a measured process ended, determined from its exit status and log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

DONE, OOM, UNSUPPORTED, CRASHED, TIMEOUT = "done", "oom", "unsupported", "crashed", "timeout"
MOST_CHARACTERS = 200
REFUSED = 2  # the exit status of a RequestError
# Killed by the kernel: as reported by Popen, by a shell, and by deepspeed's launcher, which exits with the negative
# number.
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL)
OUT_OF_MEMORY = re.compile(r"out of memory|DefaultCPUAllocator: can't allocate|MemoryError\b")
# torchrun exits with 1 whatever its ranks exited with, and gives the first one's status in its report.
REFUSED_BELOW = re.compile(rf"^\s*exitcode\s*:\s*{REFUSED}\b", re.MULTILINE)
KILLED_BELOW = re.compile(r"^\s*traceback\s*:\s*Signal 9 \(SIGKILL\) received", re.MULTILINE)
CANNOT = re.compile(r"NotImplementedError|not been implemented|Unable to JIT load")
# The last line of a traceback, after torch's rank prefix; not the launchers' own tracebacks, which follow it.
REASON = re.compile(
    r"^(?P<rank>\[[^\]]*\]:? ?)?"
    r"(?:error: .*|(?![\w.]*(?:ChildFailed|CalledProcess)Error)[\w.]*(?:Error|Exception)(?:: .*)?)$",
    re.MULTILINE,
)
# Python's messages on exceptions that ended nothing, most of them at its shutdown.
IGNORED = re.compile(r"^Exception ignored in.*\n(?:Traceback.*\n(?:[ \t].*\n)*.*\n?)?", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """`kind` is one of the constants above; `reason` is None for `DONE`."""

    kind: str
    reason: str | None = None


def outcome_of(status: int | None, log: str, patience: float) -> Outcome:
    """`status` is None for a process that was stopped after `patience` seconds."""
    if status == 0:
        return Outcome(DONE)
    if status is None:
        return Outcome(TIMEOUT, f"not done after {patience:.0f} s")
    ends = final_exceptions(log)
    if status in KILLED or KILLED_BELOW.search(log) or any(map(OUT_OF_MEMORY.search, ends)):
        return Outcome(OOM, "out of memory")
    reason = (ends or log.splitlines() or ["no output"])[0 if ends else -1].strip()[:MOST_CHARACTERS]
    refused = status == REFUSED or REFUSED_BELOW.search(log) or any(map(CANNOT.search, ends))
    return Outcome(UNSUPPORTED if refused else CRASHED, reason)


def final_exceptions(log: str) -> list[str]:
    """The last exception line of each rank, in the order of the log: later ones follow from the first. A rank's earlier
    exceptions were handled; exceptions mentioned in warnings and notes do not count."""
    last: dict[str | None, re.Match[str]] = {}
    for found in REASON.finditer(IGNORED.sub("", log)):
        last[found["rank"]] = found
    return [found[0] for found in sorted(last.values(), key=lambda found: found.start())]
