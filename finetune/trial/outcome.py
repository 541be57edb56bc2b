"""How a process that was started for its figures has ended, told from its exit status and its log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

DONE, OOM, UNSUPPORTED, CRASHED, TIMEOUT = "done", "oom", "unsupported", "crashed", "timeout"
MOST_CHARACTERS = 200
REFUSED = 2  # the exit status of a RequestError
# Out of the kernel's hands: as Popen says it, a shell, and deepspeed's launcher, which exits with the negative number.
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL)
OUT_OF_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator: can't allocate|\bMemoryError\b|Signal 9 \(SIGKILL\) received"
)
# torchrun ends with 1 whatever its ranks ended with, and tells the first one's status in its report.
REFUSED_BELOW = re.compile(rf"^\s*exitcode\s*:\s*{REFUSED}\b", re.MULTILINE)
CANNOT = re.compile(r"NotImplementedError|not been implemented|Unable to JIT load")
REASON = re.compile(r"^(?:\[[^\]]*\]:? ?)?(?:error: |[\w.]*(?:Error|Exception): ).*", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """`kind` is one of those above; `reason` is None where it is done."""

    kind: str
    reason: str | None = None


def outcome_of(status: int | None, log: str, patience: float) -> Outcome:
    """`status` is None of a process that was ended after `patience` seconds."""
    if status == 0:
        return Outcome(DONE)
    if OUT_OF_MEMORY.search(log) or status in KILLED:
        return Outcome(OOM, "out of memory")
    if status is None:
        return Outcome(TIMEOUT, f"not done after {patience:.0f} s")
    found = REASON.search(log)
    reason = (found[0] if found else (log.splitlines() or ["no output"])[-1]).strip()[:MOST_CHARACTERS]
    refused = status == REFUSED or REFUSED_BELOW.search(log) or CANNOT.search(log)
    return Outcome(UNSUPPORTED if refused else CRASHED, reason)
