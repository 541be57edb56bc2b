"""Who holds a run up: a judgement over what all ranks have told. No threads and no network here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from finetune.training.guards.position import Report

SILENT_SECONDS = 40.0  # signs of life come once a second, from a thread that waits for nothing


@dataclass(frozen=True)
class Verdict:
    """`ranks` are to blame; none where all wait for one another. `said` is one sentence."""

    ranks: tuple[int, ...]
    said: str


def judge(
    reports: Mapping[int, Report], ages: Mapping[int, float], limit: float, name_of: Callable[[int], str]
) -> Verdict | None:
    """`ages` are the seconds since each rank's last sign of life, by the clock of the one who judges.

    A rank is to blame that gives no sign for `limit`, but at most SILENT_SECONDS; or that has stood still for `limit`,
    with nothing moving in its process, outside of any collective, while another waits. Where all stand idle in
    collectives none is, and the collectives are named. A rank is never blamed that computes or moves bytes, nor before
    its first step, nor where it saves, or talks to a hub or a tracker, however long it takes.
    """
    silence = min(limit, SILENT_SECONDS)
    silent = [rank for rank, age in sorted(ages.items()) if age >= silence and not _left(reports, rank)]
    if silent:
        names = _join([_silent(reports.get(rank), name_of(rank), ages[rank]) for rank in silent])
        return Verdict(tuple(silent), names)
    there = {rank: report for rank, report in sorted(reports.items()) if not report.has_left}
    stuck = [rank for rank, report in there.items() if report.idle_seconds >= limit and _is_a_fault(report)]
    waiting = [rank for rank, report in there.items() if report.still_seconds >= limit and rank not in stuck]
    if stuck and waiting:
        names = _join([_stuck(there[rank], name_of(rank)) for rank in stuck])
        others = _join([f"{name_of(rank)} in {_place(there[rank])}" for rank in waiting[:4]])
        return Verdict(tuple(stuck), f"{names}; {others} {'waits' if len(waiting) == 1 else 'wait'} for it")
    all_wait = len(there) > 1 and all(
        report.idle_seconds >= limit and report.position.collective for report in there.values()
    )
    if not all_wait:
        return None
    names = _join([f"{name_of(rank)} in {_place(report)}" for rank, report in there.items()])
    if len({report.position.where for report in there.values()}) > 1:
        return Verdict((), f"the ranks wait for one another in different places: {names}")
    return Verdict((), f"all ranks wait in one place, and nothing moves between them ({names}): look at the network")


def _is_a_fault(report: Report) -> bool:
    """To stand there. In a collective a rank waits for others."""
    return report.has_stepped and not report.position.collective and not report.position.patient


def _left(reports: Mapping[int, Report], rank: int) -> bool:
    return rank in reports and reports[rank].has_left


def _silent(report: Report | None, name: str, age: float) -> str:
    at = f"; it stood in {_place(report)}" if report and report.position.where else ""
    return f"{name} has given no sign of life for {age:.0f} s (stopped, or its host is gone){at}"


def _stuck(report: Report, name: str) -> str:
    return f"{name} has not moved for {report.idle_seconds:.0f} s (--hang_timeout), in {report.position.where}"


def _place(report: Report) -> str:
    position = report.position
    return f"{position.collective} [{position.where}]" if position.collective else position.where


def _join(parts: list[str]) -> str:
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"
