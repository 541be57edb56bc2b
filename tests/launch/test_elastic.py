"""Hosts come and go while a run goes on: it shrinks, grows back, and takes the steps of a run that was never cut. Each
host is a supervisor with a torchrun of its own on this machine, under an address of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, REPO, TINY, Finished, flags, kill_family, launch, steps_of

from finetune.run.supervised import told

pytestmark = pytest.mark.nightly

STEPS = 160
FAULTY = "tests/runs/faulty.py"
# The steps of one host take longer, so that the other is back before the last.
SLOW_ALONE = {"kind": "alone", "rank": 0, "seconds": 0.25, "recipe": RECIPE}
RUN = {
    **TINY,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 20,
    "save_total_limit": 2,
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-5,  # a small rate, so that rounding does not grow over the steps
    "per_device_train_batch_size": 8,
    "do_eval": False,
    "max_eval_samples": None,
}
SECONDS = 240


@contextmanager
def host(address: str, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor and what comes of it; nothing of it is left."""
    torchrun = ["torchrun", "--nnodes", "1:2", "--nproc_per_node", "1", "--local_addr", address]
    torchrun += ["--rdzv_conf", "last_call_timeout=3"]
    words = [*torchrun, FAULTY, *flags({"output_dir": folder, **RUN})]
    with log.open("ab") as out:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FAULT": json.dumps(SLOW_ALONE)}
        command = [sys.executable, "-m", "finetune.cli", "supervise", "--", *words]
        process = subprocess.Popen(command, cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            kill_family(process.pid)
            process.wait()


def trainings(folder: Path) -> list[dict[str, Any]]:
    return [one for one in told(folder / "_supervise") if one["event"] == "training"]


def wait_for(condition: Callable[[], Any], said: Callable[[], str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("lost", "stays"),
    [
        pytest.param("127.0.0.1", "127.0.0.2", id="the host of rank 0 is lost"),
        pytest.param("127.0.0.2", "127.0.0.1", id="the other host is lost"),
    ],
)
def test_a_lost_host_takes_no_run_down_and_may_come_back(lost: str, stays: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    logs = {address: tmp_path / address for address in (lost, stays)}

    def said() -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in logs.values())

    with host(stays, folder, logs[stays]) as first:
        with host(lost, folder, logs[lost]):
            wait_for(lambda: len(steps_of(folder)) >= 25, said)
        wait_for(lambda: len(trainings(folder)) == 2, said)
        with host(lost, folder, logs[lost]) as back:
            assert first.wait(SECONDS) == 0, said()
            assert back.wait(SECONDS) == 0, said()
    assert [(one["hosts"], one["ranks"], one["global_batch_size"]) for one in trainings(folder)] == [
        (2, 2, 16),
        (1, 1, 16),
        (2, 2, 16),
    ], said()
    shrunk, grown = trainings(folder)[1:]
    assert shrunk["step"] >= 20  # from a checkpoint
    assert grown["step"] > shrunk["step"]
    # The ranks saved first, so no step is repeated.
    ends = [one for one in told(folder / "_supervise") if one["event"] == "rank ended" and one["status"] == 75]
    assert [one["said"] for one in ends if f"after step {grown['step']}." in one["said"]], said()
    uncut = launch("torchrun", tmp_path / "uncut", RUN, ranks=2)
    survived = Finished(0, "", folder)
    assert [row["step"] for row in survived.steps] == list(range(1, STEPS + 1))
    assert survived.column("loss") == pytest.approx(uncut.column("loss"), rel=1e-6)
