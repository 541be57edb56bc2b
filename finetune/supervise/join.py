"""Which attempt a supervisor begins or joins, and with how many hosts: by the log, which is the same for all hosts."""

from __future__ import annotations

from pathlib import Path

from finetune.run import supervised


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
