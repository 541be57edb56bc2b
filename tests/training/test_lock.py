"""One run in a run folder: the second is told who has it, and a dead owner has nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from finetune.errors import BusyError, RequestError, RunError
from finetune.run.files import IDENTITY, SUPERVISION
from finetune.run.supervised import environment_of
from finetune.training.checkpoints import lock
from finetune.training.checkpoints.lock import LOCK, give_up_locks, keep_locked, lock_run_folder, refuse_supervised

HOLD = """
import os, sys
from contextlib import suppress
from pathlib import Path
from finetune.training.checkpoints.lock import lock_run_folder
assert lock_run_folder(Path(sys.argv[1]), "python recipes/seq_cls.py") is None
if sys.argv[2] == "forks" and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path, forks: bool = False) -> subprocess.Popen[str]:
    """It has the lock until it is ended, or until nobody holds the other end of its standard input."""
    command = [sys.executable, "-c", HOLD, str(folder), "forks" if forks else "alone"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.communicate()


def test_the_second_is_refused_and_told_the_owner(tmp_path: Path) -> None:
    owner = holder(tmp_path)
    try:
        with pytest.raises(RequestError) as refused:
            lock_run_folder(tmp_path, "another")
        said = str(refused.value)
        assert f"process {owner.pid} on {os.uname().nodename}, started 20" in said
        assert "python recipes/seq_cls.py" in said
    finally:
        end(owner)


@pytest.mark.parametrize("place", [SUPERVISION, f"{SUPERVISION}/host-one"])
def test_between_attempts_the_folder_is_its_supervisors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (home := tmp_path / place).mkdir(parents=True)
    owner = holder(home)
    try:
        with pytest.raises(RequestError, match=rf"(?s){tmp_path}: a supervisor keeps .*process {owner.pid} on"):
            refuse_supervised(tmp_path)
        for name, value in environment_of(tmp_path / SUPERVISION / "attempt-2", "digest").items():
            monkeypatch.setenv(name, value)
        refuse_supervised(tmp_path)  # its own
        other = tmp_path.with_name(f"{tmp_path.name}-other")
        for name, value in environment_of(other / SUPERVISION / "attempt-2", "digest").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RequestError, match="a supervisor keeps"):
            refuse_supervised(tmp_path)
    finally:
        end(owner)
    refuse_supervised(tmp_path)


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a worker that lives on"])
def test_a_killed_owner_has_nothing(forks: bool, tmp_path: Path) -> None:
    owner = holder(tmp_path, forks)
    try:
        owner.kill()
        owner.wait()
        assert (tmp_path / LOCK).is_file()
        command = [sys.executable, "-c", HOLD, str(tmp_path), "alone"]
        again = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        assert again.stdout == b"held\n", again.stderr
    finally:
        end(owner)


def test_a_resumed_run_waits_for_its_predecessor_to_end(tmp_path: Path) -> None:
    owner = holder(tmp_path)
    waits = HOLD.replace('seq_cls.py"', 'seq_cls.py", 1e6')
    again = subprocess.Popen(
        [sys.executable, "-c", waits, str(tmp_path), "alone"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert again.stdout is not None
        said = again.stdout.readline()
        assert said.startswith(f"waiting up to 1000000 s for another run in {tmp_path}: process {owner.pid} on ")
        owner.kill()
        assert again.communicate()[0] == "held\n"
    finally:
        again.kill()
        end(owner)


def test_one_that_has_waited_in_vain_may_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    owner = holder(tmp_path)
    try:
        with pytest.raises(BusyError, match=f"process {owner.pid} on ") as busy:
            lock_run_folder(tmp_path, "another", wait_seconds=0.5)
        assert busy.value.exit_status == 75
        monkeypatch.setattr(lock.time, "sleep", lambda seconds: slept.append(seconds))
        monkeypatch.setattr(lock.time, "monotonic", lambda: 0.25 * len(slept))
        with pytest.raises(BusyError):
            lock_run_folder(tmp_path, "another", wait_seconds=1.0)
        assert slept == [lock.POLL_SECONDS] * 4, "by this clock four looks, and a last one"
    finally:
        end(owner)


def test_a_disk_that_is_too_full_for_the_owners_name_has_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    assert lock_run_folder(tmp_path, "one") is None
    command = [sys.executable, "-c", HOLD, str(tmp_path), "alone"]
    second = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "has not recorded its name" in second.stderr


def test_a_disk_without_locks_is_said_and_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", fail)
    held = len(os.listdir("/proc/self/fd"))
    said = lock_run_folder(tmp_path, "one")
    assert said == f"note: {tmp_path} cannot be locked (No locks available). Make sure that no other run writes there."
    assert len(os.listdir("/proc/self/fd")) == held
    monkeypatch.undo()
    assert lock_run_folder(tmp_path, "one") is None


def test_the_same_process_has_it_already(tmp_path: Path) -> None:
    assert lock_run_folder(tmp_path, "one") is None
    assert lock_run_folder(tmp_path, "one") is None


def test_an_owner_that_has_not_written_its_name_is_said_so(tmp_path: Path) -> None:
    owner = holder(tmp_path)
    try:
        (tmp_path / LOCK).write_text('{"pid": 1')
        with pytest.raises(RequestError, match="has not recorded its name"):
            lock_run_folder(tmp_path, "another")
    finally:
        end(owner)


def test_what_was_given_up_is_not_closed_again(tmp_path: Path) -> None:
    assert lock_run_folder(tmp_path, "one") is None
    give_up_locks()
    with (tmp_path / "other").open("w") as other:  # of the handle's number
        give_up_locks()
        assert os.fstat(other.fileno()).st_size == 0


def test_a_lock_that_was_deleted_under_its_owner_is_taken_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_locked(tmp_path)  # of a run without a lock
    assert lock_run_folder(tmp_path, "the first") is None
    keep_locked(tmp_path)
    assert capsys.readouterr().out == ""
    (tmp_path / LOCK).unlink()
    keep_locked(tmp_path)
    said = f"warning: {tmp_path / LOCK} was deleted under this run, which has locked the folder again.\n"
    assert capsys.readouterr().out == said
    command = [sys.executable, "-c", HOLD, str(tmp_path), "alone"]
    second = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "another run writes there" in second.stderr
    assert ": the first)" in second.stderr


def test_a_run_whose_folder_another_has_locked_meanwhile_ends(tmp_path: Path) -> None:
    assert lock_run_folder(tmp_path, "the first") is None
    (tmp_path / LOCK).unlink()
    owner = holder(tmp_path)
    try:
        with pytest.raises(RunError, match=f"was deleted under this run.* another run .*process {owner.pid} on "):
            keep_locked(tmp_path)
    finally:
        end(owner)


def test_a_disk_that_fails_for_a_while_does_not_cost_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(path: Path, **how: bool) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    lock_run_folder(tmp_path, "mine")
    (handle,) = (held.handle for path, held in lock._held.items() if path.parent == tmp_path.resolve())
    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", fails)
        keep_locked(tmp_path)
    os.fstat(handle)
    assert capfd.readouterr().out == ""


def test_a_run_leaves_a_folder_in_which_another_has_begun_since_alone(tmp_path: Path) -> None:
    (tmp_path / IDENTITY).write_text("the first")
    assert lock_run_folder(tmp_path, "the first") is None
    keep_locked(tmp_path)
    (tmp_path / LOCK).unlink()
    keep_locked(tmp_path)
    (tmp_path / LOCK).unlink()
    (tmp_path / IDENTITY).write_text("the second, which has ended")
    with pytest.raises(RunError, match="another run has begun in the folder"):
        keep_locked(tmp_path)
