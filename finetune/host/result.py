"""The input and the result of a check of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OK, WARNING, FAILED, ABSENT = "ok", "warning", "failed", "absent"


@dataclass(frozen=True)
class Asked:
    """What the user said about the planned run."""

    output_dir: Path
    nvme_path: Path | None
    hostfile: Path | None
    port: int
    master_addr: str | None = None


@dataclass(frozen=True)
class Result:
    """`status`: ok, warning (it works, but worse), failed, or absent (nothing to check). `needed`: the defaults need
    it, so a failure decides the exit status. `mend` says what to do about a warning or a failure."""

    name: str
    status: str
    found: str
    mend: str = ""
    needed: bool = False
    seconds: float = 0.0


def verdict(name: str, works: bool, found: str, mend: str, needed: bool = True) -> Result:
    """A result that is ok or failed; `mend` is kept only for a failure."""
    return Result(name, OK if works else FAILED, found, "" if works else mend, needed)


def warned(name: str, works: bool, found: str, mend: str) -> Result:
    """A result that is ok or a warning; `mend` is kept only for a warning."""
    return Result(name, OK if works else WARNING, found, "" if works else mend)
