"""What a supervisor makes of a log that several hosts have written."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from finetune.run.supervised import tell, told
from finetune.supervise import run
from finetune.supervise.attempt import SIGNALS, Requested, run_attempt
from finetune.supervise.command import Command
from finetune.supervise.run import most_hosts_of, needs_all_hosts, next_attempt


@pytest.fixture
def signals() -> Iterator[None]:
    """A supervisor replaces the handlers of this process."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("attempts", "ends", "may_join", "expected"),
    [
        pytest.param(0, [], True, 1, id="the first"),
        pytest.param(2, ["attempt failed"], True, 2, id="others are in it"),
        pytest.param(2, ["attempt failed"], False, 3, id="no others can be"),
        pytest.param(2, ["attempt failed", "attempt failed"], True, 3, id="it failed"),
        pytest.param(2, ["attempt failed", "stopped"], True, 3, id="it was stopped"),
        pytest.param(10, ["attempt failed"], True, 10, id="10 is newer than 9"),
    ],
)
def test_a_host_joins_the_newest_attempt_unless_it_is_over(
    attempts: int, ends: list[str], may_join: bool, expected: int, tmp_path: Path
) -> None:
    for number in range(1, attempts + 1):
        (tmp_path / f"attempt-{number}").mkdir()
    for number, event in enumerate(ends, 1):
        tell(tmp_path, event, "it ended", attempt=number)
    assert next_attempt(tmp_path, may_join=may_join) == expected


def test_every_host_that_enters_an_attempt_has_the_limit_that_the_one_before_found(tmp_path: Path) -> None:
    assert most_hosts_of(tmp_path, 1) is None
    tell(tmp_path, "attempt failed", "it does not divide", attempt=3, most_hosts=2)
    tell(tmp_path, "attempt failed", "another host, which was lost", attempt=3, most_hosts=None)
    assert [most_hosts_of(tmp_path, number) for number in (3, 4, 5)] == [None, 2, None]


def test_all_hosts_are_needed_until_the_command_has_trained_or_a_checkpoint_keeps_the_batch(tmp_path: Path) -> None:
    assert needs_all_hosts(tmp_path, "same", has_checkpoint=False)
    assert needs_all_hosts(tmp_path, "same", has_checkpoint=True)  # of a run that nobody supervised
    tell(tmp_path, "training", "it began", command="other")
    assert needs_all_hosts(tmp_path, "same", has_checkpoint=False)
    assert not needs_all_hosts(tmp_path, "same", has_checkpoint=True)
    assert not needs_all_hosts(tmp_path, "other", has_checkpoint=False)


def unreadable(*_: object, **__: object) -> str:
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.usefixtures("signals")
def test_a_log_that_cannot_be_read_for_a_while_is_not_printed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = run._Supervisor(Command((), (), tmp_path), tmp_path, 5)
    supervisor.home.mkdir()
    supervisor._tell("attempt", "attempt 1 starts", attempt=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", unreadable)
        assert told(supervisor.home) == []
        supervisor._show()
    supervisor._show()
    assert capsys.readouterr().err.count("attempt 1 starts") == 1


@pytest.mark.usefixtures("signals")
def test_no_rank_is_left_without_a_supervisor(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    waits = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"

    def look() -> None:
        if pid.is_file() and pid.read_text():
            raise OSError(errno.ESTALE, "Stale file handle")

    with pytest.raises(OSError, match="Stale"):
        run_attempt([sys.executable, "-c", waits], {}, Requested(), look)
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


def test_the_note_of_a_disk_without_locks_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "lock_run_folder", lambda *_, **__: "note: it cannot be locked")
    monkeypatch.setattr(run._Supervisor, "__init__", lambda *_: None)
    monkeypatch.setattr(run._Supervisor, "run", lambda _: 0)
    assert run.supervise(["python", __file__, "--output_dir", str(tmp_path / "run")], 5) == 0
    assert "it cannot be locked" in capsys.readouterr().err
