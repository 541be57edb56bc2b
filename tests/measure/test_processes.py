"""What is started for a trial is ended, whatever session its processes are in."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REPO

from finetune.measure import processes
from finetune.measure.outcome import OOM, TIMEOUT

# A launcher whose worker has a session of its own, writes its number, and does not listen to SIGTERM.
WORKER = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WORKER += "open(sys.argv[1] + '.new', 'w').write(str(os.getpid())); os.rename(sys.argv[1] + '.new', sys.argv[1]); "
WORKER += "time.sleep(300)"
LAUNCHER = "import subprocess, sys; "
LAUNCHER += "worker = subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]], start_new_session=True); "
WAITING = LAUNCHER + "worker.wait()"
LEAVING = LAUNCHER + "import os, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nos.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)


def command(launcher: str, number: Path) -> list[str]:
    return [sys.executable, "-c", launcher, str(number), WORKER]


def is_running(number: Path) -> bool:
    try:
        return bool(psutil.Process(int(number.read_text())).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(number: Path) -> None:
    """Until the worker has begun; as long as that takes."""
    while not number.exists():
        time.sleep(0.05)


def test_a_run_that_is_not_done_in_time_leaves_no_worker_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over once the worker is there."""
    number, wait = tmp_path / "worker", subprocess.Popen.wait

    def waits(process: Any, timeout: float | None = None) -> int:
        if timeout == 7.0:
            wait_for(number)
            timeout = 0.0
        return int(wait(process, timeout))

    monkeypatch.setattr(subprocess.Popen, "wait", waits)
    ended = processes.run(command(WAITING, number), tmp_path / "log.txt", patience=7.0)
    assert ended.kind == TIMEOUT
    assert "7 s" in str(ended.reason)
    assert not is_running(number)


def test_a_launcher_that_was_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    assert processes.run(command(LEAVING, tmp_path / "worker"), tmp_path / "log.txt", patience=1e6).kind == OOM
    assert not is_running(tmp_path / "worker")


def test_sigterm_to_whoever_waits_ends_all(tmp_path: Path) -> None:
    number = tmp_path / "worker"
    code = "from pathlib import Path; from finetune.measure import processes; processes.GRACE_SECONDS = 1.0\n"
    code += f"processes.run({command(WAITING, number)!r}, Path({str(tmp_path / 'log.txt')!r}), 1e6)"
    waiting = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.DEVNULL)
    wait_for(number)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait() == 128 + signal.SIGTERM
    assert not is_running(number)
