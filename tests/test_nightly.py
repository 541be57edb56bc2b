"""The nightly tests have been run, whole and without a failure, on a tree that is not much older than this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nightly_record import PRODUCT, RECORD, REPO, git

MOST_COMMITS = 60  # of product code since
OF_THE_PROCESSOR = "this CPU "  # such a reason is in the record, but does not make a night on that machine worthless
MEND = (
    "Run `bash .ci/nightly`, after a mend `bash .ci/nightly --nightly_retry`, or after an interruption "
    "`bash .ci/nightly --nightly_go_on`, and commit tests/nightly.json."
)


def faults_of(record: dict[str, Any]) -> list[str]:
    """Why such a record does not count, whatever its age."""
    found = []
    if record["failures"]:
        found.append(f"nightly tests failed: {', '.join(record['failures'])}")
    if record["selected"] != "nightly" or record["narrowed"]:
        found.append(f"not all nightly tests were asked for: -m {record['selected']!r} {record['narrowed']}")
    if record["uncommitted"]:
        found.append(f"what ran was not what was committed: {record['uncommitted']}")
    if record.get("left"):
        found.append(f"it was interrupted, and these files are left: {', '.join(record['left'])}")
    if not record["passed"]:
        found.append("nothing passed")
    left_out = [reason for reason in record["skipped"] if not reason.startswith(OF_THE_PROCESSOR)]
    if left_out:
        found.append(f"tests were left out: {left_out}")
    return found


def recorded() -> dict[str, Any]:
    """Until a first run has been recorded there is nothing to hold; from then on it must stay, as the README says."""
    has_history = (REPO / ".git").exists()
    if not RECORD.is_file() and not (has_history and git("log", "--format=%h", "-1", "--", str(RECORD))):
        pytest.skip(f"no nightly run has been recorded yet. {MEND}")
    assert RECORD.is_file(), f"tests/nightly.json is gone. {MEND}"
    return dict(json.loads(RECORD.read_text()))


def test_the_last_nightly_run_was_whole_and_without_failures() -> None:
    assert faults_of(recorded()) == [], MEND


def test_the_last_nightly_run_is_not_long_ago() -> None:
    if not (REPO / ".git").exists():
        pytest.skip("no git history: the age of tests/nightly.json is not known")
    commit = recorded()["commit"]
    known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=REPO, capture_output=True)
    if known.returncode and git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip(f"a shallow clone without {commit}, of which tests/nightly.json tells")
    assert known.returncode == 0, f"tests/nightly.json tells of {commit}, which is no commit here. {MEND}"
    since = int(git("rev-list", "--count", f"{commit}..HEAD", "--", *PRODUCT))
    assert since <= MOST_COMMITS, f"{since} commits of product code since the last nightly run. {MEND}"


def test_a_test_that_the_processor_cannot_run_is_no_fault_of_a_night() -> None:
    assert faults_of({**WHOLE, "skipped": {"this CPU has no convolutions in bf16: ...": 1}}) == []


WHOLE = {"failures": [], "selected": "nightly", "narrowed": [], "uncommitted": [], "passed": 3, "skipped": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"failures": ["tests/test_some.py::test_bad"]},
        {"selected": "not nightly"},
        {"narrowed": ["-k x"]},
        {"uncommitted": [" M a.py"]},
        {"passed": 0},
        {"skipped": {"no browser": 1}},
        {"left": ["tests/test_some.py"]},
    ],
    ids=str,
)
def test_a_run_that_failed_or_was_narrowed_or_left_tests_out_does_not_count(change: dict[str, Any]) -> None:
    assert faults_of(WHOLE) == []
    assert len(faults_of({**WHOLE, **change})) == 1


def test_a_run_is_recorded_with_its_reasons_for_skipping(tmp_path: Path) -> None:
    tests = (
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_broken(missing): pass\n"
        "@pytest.fixture\ndef torn(): yield; assert False\n"
        "def test_torn(torn): pass\n"
        "def test_left_out(): pytest.skip('no browser')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("from nightly_record import *\n")
    env = {**os.environ, "PYTHONPATH": str(REPO / "tests")}
    for more in ([], ["-n", "1"]):
        (tmp_path / "test_some.py").write_text(tests)
        words = ["-q", "--nightly_record", "record.json", *more]
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tmp_path, env=env, capture_output=True)
        record = json.loads((tmp_path / "record.json").read_text())
        assert (record["passed"], record["skipped"]) == (1, {"no browser": 1})
        assert record["failures"] == [f"test_some.py::test_{name}" for name in ("bad", "broken", "torn")]
        assert record["commit"] == git("rev-parse", "HEAD")
        assert record["narrowed"] == []
        (tmp_path / "test_some.py").write_text(
            f"{tests}def test_new(): assert False\n".replace("assert False", "pass", 1)
        )
        subprocess.run([sys.executable, "-m", "pytest", *words, "--nightly_retry"], cwd=tmp_path, env=env)
        record = json.loads((tmp_path / "record.json").read_text())
        assert (record["passed"], record["failures"]) == (2, ["test_some.py::test_broken", "test_some.py::test_torn"])
        assert record["retried"] == [{"commit": git("rev-parse", "HEAD"), "tests": ["test_some.py::test_bad"]}]


@pytest.mark.parametrize("more", [[], ["-n", "1", "--dist", "loadfile"]], ids=["here", "worker"])
def test_a_night_that_is_interrupted_goes_on_with_the_files_that_are_left(more: list[str], tmp_path: Path) -> None:
    main = "os.getppid()" if more else "os.getpid()"  # of these tests, which may themselves run in a worker
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("from nightly_record import *\n")
    largest = "".join(f"def test_{number}(): pass\n" for number in range(3))  # xdist takes it first
    (tmp_path / "test_1.py").write_text(largest)
    (tmp_path / "test_2.py").write_text(
        "import os, pathlib, signal, time\n"
        "def test_good(): pass\n"
        "def test_cut_off():\n"
        "    if not pathlib.Path('again').exists():\n"
        "        pathlib.Path('again').touch()\n"
        "        time.sleep(1)\n"  # until a worker's earlier reports have arrived
        f"        os.kill({main}, signal.SIGINT)\n"
        "        signal.pause()\n"
    )
    (tmp_path / "test_3.py").write_text("def test_good(): pass\n")
    env = {**os.environ, "PYTHONPATH": str(REPO / "tests")}
    words = [sys.executable, "-m", "pytest", "-q", "--nightly_record", "record.json", *more]
    records = []
    for how in ([], ["--nightly_go_on"]):
        subprocess.run([*words, *how], cwd=tmp_path, env=env, capture_output=True, timeout=100)
        records.append(json.loads((tmp_path / "record.json").read_text()))
    assert [record["left"] for record in records] == [["test_2.py", "test_3.py"], []]
    assert [record["passed"] for record in records] == [3, 6]
    assert [one["commit"] for one in records[1]["went_on"]] == [git("rev-parse", "HEAD")]


@pytest.mark.parametrize("fails", ["update", "install", "pytest", "mutants", ""])
def test_a_night_without_its_packages_is_not_begun_and_each_part_can_fail_it(fails: str, tmp_path: Path) -> None:
    """With an apt-get, a pytest and a python of our own, and as root."""
    tools = {
        "apt-get": f'[ "$1" != "{fails}" ] || {{ echo "E: no network" >&2; exit 100; }}',
        "id": "echo 0",
        "pytest": f"touch {tmp_path}/ran; exit {int(fails == 'pytest')}",
        "python": f'echo "$@" > {tmp_path}/mutants; exit {int(fails == "mutants")}',
    }
    for name, does in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "nightly").write_text((REPO / ".ci" / "nightly").read_text())
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", ".ci/nightly"], cwd=tmp_path, env=env, capture_output=True, text=True)
    is_begun = fails not in ("update", "install")
    assert (tmp_path / "ran").exists() is is_begun
    assert (tmp_path / "mutants").exists() is is_begun, "also where tests have failed"
    assert (done.returncode == 0) is (fails == "")
    assert ("E: no network" in done.stderr and "error: apt-get could not install" in done.stderr) is not is_begun
    if is_begun:
        assert (
            (tmp_path / "mutants").read_text().startswith("benchmarks/mutants.py --sample 50 --seconds 1200 --seed 2")
        )


def test_the_tests_are_collected_without_pytests_cache() -> None:
    """Where the checkout cannot be written to, it is switched off."""
    words = ["-p", "no:cacheprovider", "-q", "--collect-only", "tests/test_hostfile.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
