"""`finetune supervise` over a command that fails as a test wishes; real processes, none of which imports torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REPO

from finetune.run.supervised import LOG, told
from finetune.supervise.attempt import signal_in

FAKE = Path(__file__).with_name("fake_recipe.py")
TORCHRUN = f"""#!{sys.executable}
import os, sys
from pathlib import Path
words = sys.argv[1:]
with open(Path(sys.argv[0]).with_name("nnodes"), "a") as given:
    print(words[words.index("--nnodes") + 1], words[words.index("--rdzv_id") + 1], file=given)
place = next(i for i, word in enumerate(words) if word.endswith(".py"))
os.execv(sys.executable, [sys.executable, *words[place:]])
"""


def command(folder: Path, plan: list[dict[str, Any]], *words: str) -> list[str]:
    (folder.parent / "plan.json").write_text(json.dumps(plan))
    return [sys.executable, "-m", "finetune.cli", "supervise", *words, "--", sys.executable, str(FAKE),
            *("--output_dir", str(folder))]  # fmt: skip


def supervised(folder: Path, plan: list[dict[str, Any]], *words: str) -> subprocess.CompletedProcess[str]:
    run = command(folder, plan, *words)
    return subprocess.run(run, cwd=REPO, capture_output=True, text=True, check=False, timeout=60)


def elastic(folder: Path, plan: list[dict[str, Any]], nnodes: str) -> subprocess.CompletedProcess[str]:
    """Under a torchrun that starts one rank at once and writes down the hosts and the attempt that it is given."""
    torchrun = folder.parent / "torchrun"
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    run = command(folder, plan)
    place = run.index("--") + 1
    run[place : place + 1] = [str(torchrun), "--nnodes", nnodes]
    return subprocess.run(run, cwd=REPO, capture_output=True, text=True, check=False, timeout=60)


def rendezvous(folder: Path) -> list[str]:
    return (folder.parent / "nnodes").read_text().splitlines()


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def events(folder: Path) -> list[str]:
    return [one["event"] for one in told(folder / "_supervise")]


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} has not come"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_run_that_fails_twice_ends_well_and_the_log_tells_the_story(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    plan: list[dict[str, Any]] = [
        {"status": 1, "checkpoint": 10, "position-0": {"step": 14}},
        {"status": -9, "checkpoint": 20},
        {"status": 0},
    ]
    done = supervised(folder, plan)
    assert done.returncode == 0, done.stderr
    assert starts(folder) == 3
    assert events(folder) == ["attempt", "attempt failed", "attempt", "attempt failed", "attempt", "stopped"]
    first, second = [one for one in told(folder / "_supervise") if one["event"] == "attempt failed"]
    assert (first["attempt"], first["status"], first["step"], first["newest_checkpoint"]) == (1, 1, 14, 10)
    assert (second["status"], second["step"], second["newest_checkpoint"]) == (137, None, 20)
    for one in told(folder / "_supervise"):
        assert f"{one['host']}: {one['said']}" in done.stderr
    assert "attempt 1 ended with status 1 in step 14, after" in done.stderr
    assert "stopped with status 0: the run is done" in done.stderr


def test_the_command_that_starts_a_recipe_by_its_name_is_supervised_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = command(folder, [{"status": 1, "checkpoint": 10}, {"status": 0}])
    place = run.index("--") + 1
    run[place : place + 1] = ["finetune", "train", "--launcher", "python"]
    done = subprocess.run(run, cwd=REPO, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"# python {FAKE} --output_dir {folder}" in done.stderr
    assert starts(folder) == 2


def test_a_wrong_request_is_not_tried_again(tmp_path: Path) -> None:
    done = supervised(tmp_path / "run", [{"status": 2}])
    assert done.returncode == 2
    assert starts(tmp_path / "run") == 1
    assert "the request is wrong" in done.stderr


def test_what_a_rank_tells_counts_for_more_than_the_status_of_its_launcher(tmp_path: Path) -> None:
    """torchrun ends with 1, whatever a rank's status was."""
    done = supervised(tmp_path / "run", [{"status": 1, "rank says": 2}])
    assert done.returncode == 2
    assert starts(tmp_path / "run") == 1
    assert "rank 0 ended with status 2: the disk is full" in done.stderr


@pytest.mark.parametrize(("place", "ahead"), [("step", ""), ("reading", "; or while rows 7 were read ahead")])
def test_the_same_step_twice_stops_and_names_its_samples(place: str, ahead: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    row = {"status": 1, "position-0": {place: 57}, "samples.json": {"step": [5, 9, 2], "ahead": [7]}}
    done = supervised(folder, [row])
    assert done.returncode == 1
    assert starts(folder) == 2
    assert f"step 57 has failed twice, with the same samples: rows 5, 9, 2{ahead}\n" in done.stderr
    assert (folder / "_supervise" / "attempt-2" / "failed_at").read_text() == "57"
    assert told(folder / "_supervise")[-1]["samples"] == [5, 9, 2]


def test_a_failure_while_saving_is_blamed_on_no_step(tmp_path: Path) -> None:
    done = supervised(tmp_path / "run", [{"status": 1, "position-0": {"after": 50}}], "--max_restarts", "1")
    assert done.returncode == 1
    assert starts(tmp_path / "run") == 2
    assert "1 restart(s) in a row have brought no new checkpoint" in done.stderr


def test_a_rank_that_outlives_its_launcher_ends_before_the_next_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = supervised(folder, [{"status": -9, "leaves a rank": True}, {"status": 0}])
    assert done.returncode == 0, done.stderr
    assert has_ended(int((folder / "left").read_text()))


def test_a_build_that_was_cut_off_does_not_hold_up_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    others = tmp_path / "ops" / "cpu_adam" / "lock"
    others.parent.mkdir(parents=True)
    others.touch()  # of another machine: no process here holds it
    done = supervised(tmp_path / "run", [{"status": -9, "builds": "deepspeed_shm_comm"}, {"status": 0}])
    assert done.returncode == 0, done.stderr
    assert "supervise: a build of deepspeed_shm_comm was cut off" in done.stdout
    assert "attempt 1 ended with status 137 (SIGKILL), after" in done.stderr
    assert [lock.parent.name for lock in tmp_path.glob("ops/*/lock")] == ["cpu_adam"]


def test_a_status_tells_its_signal() -> None:
    said = {status: signal_in(status) for status in (0, 1, 2, 75, 130, 137, 247, 241)}
    assert said == {
        0: "",
        1: "",
        2: "",
        75: "",
        130: " (SIGINT)",
        137: " (SIGKILL)",
        247: " (SIGKILL)",
        241: " (SIGTERM)",
    }


def test_a_host_does_not_join_an_attempt_that_others_have_given_up(tmp_path: Path) -> None:
    """It would wait there for hosts that are in the next one."""
    given_up = [[2, "attempt", {}], [2, "attempt failed", {}]]
    plan: list[dict[str, Any]] = [{"status": 1, "hosts tell": given_up}, {"status": 0, "rank says": 0}]
    done = elastic(tmp_path / "run", plan, "1:2")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in rendezvous(tmp_path / "run")] == ["attempt-1", "attempt-3"]
    assert done.stderr.count("supervise: a traceback above is torchrun's own") == 1


def test_a_host_stops_where_others_found_that_trying_again_makes_no_sense(tmp_path: Path) -> None:
    stopped = [[2, "attempt failed", {}], [2, "stopped", {"status": 2, "for_all": True}]]
    plan: list[dict[str, Any]] = [{"status": 1, "hosts tell": stopped}, {"status": 0, "rank says": 0}]
    done = elastic(tmp_path / "run", plan, "1:2")
    assert done.returncode == 2, done.stderr
    assert starts(tmp_path / "run") == 1


def test_a_run_continues_on_the_hosts_among_which_its_batch_divides(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    told_before = [[1, "training", {"command": None}], [1, "rank ended", {"status": 2, "most_hosts": 3}]]
    plan: list[dict[str, Any]] = [
        {"status": 1, "hosts tell": told_before},
        {"status": 1},
        {"status": 0, "rank says": 0},
    ]
    done = elastic(folder, plan, "1:4")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in rendezvous(folder)] == ["4:4", "3:3", "4:4"]  # it has never trained


def test_ctrl_c_on_another_host_only_takes_that_host_away(tmp_path: Path) -> None:
    elsewhere = [[1, "rank ended", {"status": 130, "host": "elsewhere"}]]
    plan: list[dict[str, Any]] = [{"status": 1, "hosts tell": elsewhere}, {"status": 1, "rank says": 130}]
    done = elastic(tmp_path / "run", plan, "1:2")
    assert done.returncode == 130, done.stderr
    assert starts(tmp_path / "run") == 2
    assert not told(tmp_path / "run" / "_supervise")[-1]["for_all"]


def test_an_interrupt_that_no_terminal_sends_reaches_the_run_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = command(folder, [{"status": 0, "waits": True}])
    with subprocess.Popen(run, cwd=REPO, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(folder / "waits")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "stopped with status 130: a signal asked for it" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_the_run_and_another_supervisor_is_refused_meanwhile(
    number: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = command(folder, [{"status": 0, "waits": True}])
    with subprocess.Popen(run, cwd=REPO, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(folder / "waits")
            if number == signal.SIGTERM:
                other = subprocess.run(run, cwd=REPO, capture_output=True, text=True, check=False, timeout=60)
                assert other.returncode == 2
                assert "another run writes there" in other.stderr
            process.send_signal(number)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 75, said
    assert starts(folder) == 1
    assert "stopped with status 75: a signal asked for it" in said


def test_the_run_of_a_killed_supervisor_lives_on_beside_the_next_attempt_of_a_later_one(tmp_path: Path) -> None:
    """The ranks of that attempt wait for the run folder (tests/training/test_lock.py)."""
    folder = tmp_path / "run"
    plan: list[dict[str, Any]] = [{"status": 0, "waits": True}, {"status": 0}]
    with subprocess.Popen(command(folder, plan), cwd=REPO, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(folder / "waits")
            (orphan,) = psutil.Process(process.pid).children()
        finally:
            process.kill()
    try:
        done = supervised(folder, plan)
        assert done.returncode == 0, done.stderr
        assert not has_ended(orphan.pid)
        assert [(one["event"], one["attempt"]) for one in told(folder / "_supervise")] == [
            ("attempt", 1), ("attempt", 2), ("stopped", 2),
        ]  # fmt: skip
    finally:
        orphan.kill()


def test_a_later_supervisor_goes_on_in_the_same_log(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert supervised(folder, [{"status": 2}]).returncode == 2
    with (folder / "_supervise" / LOG).open("a") as log:
        log.write('{"event": "atte\n')  # a line that a kill has torn
    done = supervised(folder, [{"status": 2}, {"status": 0}])
    assert done.returncode == 0, done.stderr
    assert [one["attempt"] for one in told(folder / "_supervise")] == [1, 1, 1, 2, 2]
    assert "the request is wrong" not in done.stderr  # that is of the earlier one


def test_a_run_whose_folder_is_gone_is_not_started_again(tmp_path: Path) -> None:
    done = supervised(tmp_path / "run", [{"status": 1, "deletes its folder": True}])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"finetune: {tmp_path / 'run'} is gone: it was deleted")
    assert not (tmp_path / "run").exists()


def test_a_command_that_does_not_exist_is_a_wrong_request(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "finetune.cli", "supervise", "--", "no-such-launcher", str(FAKE), "--output_dir"]
    done = subprocess.run([*run, str(tmp_path / "run")], cwd=REPO, capture_output=True, text=True, check=False,
                          env={**os.environ}, timeout=60)  # fmt: skip
    assert done.returncode == 2
    assert "no-such-launcher: there is no such command. Give" in done.stderr
    assert not (tmp_path / "run").exists(), "no attempt was started"
