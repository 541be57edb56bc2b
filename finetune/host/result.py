"""What the machine is asked, and what one look at it gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OK, WARNING, FAILED, ABSENT = "ok", "warning", "failed", "absent"


@dataclass(frozen=True)
class Asked:
    """What the user said of the run to come."""

    output_dir: Path
    nvme_path: Path | None
    hostfile: Path | None
    port: int
    master_addr: str | None = None


@dataclass(frozen=True)
class Result:
    """`status`: ok, warning (it works, worse), failed, or absent (there is nothing to try). `needed`: the defaults
    need it, so that a failure decides the exit status. `mend` says what to do about a warning or a failure."""

    name: str
    status: str
    found: str
    mend: str = ""
    needed: bool = False
    seconds: float = 0.0


def verdict(name: str, works: bool, found: str, mend: str, needed: bool = True) -> Result:
    """Of what works or fails, with the mend where it fails."""
    return Result(name, OK if works else FAILED, found, "" if works else mend, needed)


def warned(name: str, works: bool, found: str, mend: str) -> Result:
    """Of what works, or works worse."""
    return Result(name, OK if works else WARNING, found, "" if works else mend)
