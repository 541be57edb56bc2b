"""The folder in which `finetune supervise` and the ranks that it starts tell one another where the run is. No torch."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.errors import first_line, plain
from finetune.run.launch import COUNT, own_rank

# For the ranks: the folder of this attempt, and what tells this recipe and its flags from others. Over ssh, DeepSpeed
# passes on only variables with such a beginning (0.19.8, launcher/runner.py, EXPORT_ENVS).
ENVIRONMENT = "PYTHON_FINETUNE_SUPERVISED"
COMMAND = "PYTHON_FINETUNE_SUPERVISED_COMMAND"
LOG = "log.jsonl"
ATTEMPT = re.compile(r"attempt-([0-9]{1,9})")
FAILED_AT, SAMPLES, POSITION = "failed_at", "samples.json", "position-"
TRAINING, ENDED = "training", "rank ended"  # events that ranks tell
FAILED, STOPPED = "attempt failed", "stopped"  # events that a supervisor tells
STOPS = (ENDED, FAILED)  # what a new start follows
LONGEST_SAID = 500  # characters


def own_attempt() -> Path | None:
    """The folder of the attempt that this process belongs to; None if nobody supervises it."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else None


def own_command() -> str | None:
    """The digest of the command that this process belongs to; None if nobody supervises it."""
    return os.environ.get(COMMAND)


def environment_of(attempt: Path, digest: str) -> dict[str, str]:
    """What the ranks of an attempt need in their environment."""
    return {ENVIRONMENT: str(attempt.absolute()), COMMAND: digest}


def number_of(attempt: Path) -> int:
    """The number in the folder's name; 0 if it has none."""
    found = ATTEMPT.fullmatch(attempt.name)
    return int(found[1]) if found else 0


def attempts_in(home: Path) -> list[Path]:
    """The folders of the attempts, oldest first."""
    return sorted((path for path in home.glob("attempt-*") if number_of(path)), key=number_of)


def tell(home: Path, event: str, said: str, **facts: Any) -> None:
    """Add a line to the log, which several hosts write: `said` is for people, the rest for programs. A disk that cannot
    be written must not end a run, so its errors are ignored."""
    record = {"time": round(time.time(), 3), "host": socket.gethostname(), "event": event, **facts}
    record["said"] = plain(said)[:LONGEST_SAID]
    with suppress(OSError):
        handle = os.open(home / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with open(handle, "ab", buffering=0) as file:
            with suppress(OSError):  # a disk without locks; O_APPEND keeps lines apart at least on a local one
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(record).encode() + b"\n")


def told(home: Path) -> list[dict[str, Any]]:
    """The records of the log, in order, without lines that a kill has torn; none if it cannot be read, such as from a
    network disk that is away: that must not end a run either."""
    text, found = "", []
    with suppress(OSError):
        text = (home / LOG).read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("event"), str):
                found.append(record)
    return found


def last(records: Iterable[Mapping[str, Any]], *events: str) -> Mapping[str, Any] | None:
    """The newest record of one of these events."""
    return next((one for one in reversed(list(records)) if one["event"] in events), None)


def stopped_at(records: Iterable[Mapping[str, Any]]) -> float | None:
    """When training stopped, by the first word of it since the last start; None if it has not trained since, or never
    stopped."""
    found: float | None = None
    for one in records:
        if one["event"] == TRAINING:
            found = None
        elif one["event"] in STOPS and found is None:
            found = one.get("time")
    return found


def tell_end(status: int, error: BaseException | None = None) -> None:
    """Tell how this rank ends, if it is supervised: launchers have exit statuses of their own."""
    attempt = own_attempt()
    if attempt is None:
        return
    why = f": {first_line(error, LONGEST_SAID)}" if error and str(error) else ""
    facts: dict[str, Any] = {"rank": own_rank(), "status": status, "attempt": number_of(attempt)}
    hosts = getattr(error, "most_hosts", None)
    facts |= {} if hosts is None else {"most_hosts": hosts}
    what = "finished" if status == 0 else f"ended with status {status}"
    tell(attempt.parent, ENDED, f"rank {own_rank()} {what}{why}", **facts)


def hosts_of_launch() -> int:
    """The hosts of this launch, as torchrun tells them; 1 otherwise."""
    given = os.environ.get("GROUP_WORLD_SIZE", "")
    return int(given) if COUNT.fullmatch(given) else 1


def batch_at_first_start() -> int | None:
    """The global batch size that the supervised command began with, before it had a checkpoint to tell it. A command
    with other flags begins anew: its user may have changed the batch, because it did not fit."""
    return next((batch for batch, command in _batches() if command == own_command()), None)


def has_begun_with(batch: int) -> bool:
    """Whether the supervised run has trained with this global batch size, with whatever flags."""
    return any(batch == one for one, _ in _batches())


def _batches() -> list[tuple[int, str | None]]:
    """Of each start that trained: the global batch size, and the command's digest."""
    attempt = own_attempt()
    starts = [one for one in told(attempt.parent) if one["event"] == TRAINING] if attempt else []
    found = [(one.get("global_batch_size"), one.get("command")) for one in starts]
    return [(batch, command) for batch, command in found if isinstance(batch, int) and batch > 0]
