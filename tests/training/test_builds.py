"""A run waits for builds that somebody does, and is refused for those of its own ops that nobody does any more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.errors import RequestError
from finetune.training.builds import (
    STALE_BUILD_SECONDS,
    _open_files,
    builds_of,
    give_up_builds,
    ops_of,
    refuse_stale_builds,
    stale_builds,
    tell_of_builds,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def lock_of(op: str, home: Path, age: float = STALE_BUILD_SECONDS + 60) -> Path:
    lock = home / "py311_cpu" / op / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    return lock


def test_a_build_that_nobody_does_is_refused_where_the_run_needs_it(home: Path) -> None:
    lock = lock_of("async_io", home)
    refuse_stale_builds({"cpu_adam", "deepspeed_shm_comm"})
    with pytest.raises(RequestError, match="a build of DeepSpeed's async_io was interrupted 16 minutes ago"):
        refuse_stale_builds({"async_io"})
    assert [found for found, _ in stale_builds()] == [lock]


def test_a_lock_whose_builder_lives_is_waited_for(home: Path) -> None:
    lock = lock_of("cpu_adam", home)
    code = f"import os, sys; os.open({str(lock)!r}, os.O_RDONLY); print(flush=True); sys.stdin.read()"
    builder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert builder.stdin is not None
    assert builder.stdout is not None
    with builder:
        builder.stdout.readline()
        assert stale_builds() == []
        builder.stdin.close()
    assert [found for found, _ in stale_builds()] == [lock]


def test_only_the_build_that_was_seen_is_given_up(home: Path) -> None:
    lock = lock_of("cpu_adam", home)
    with lock.open() as held:
        assert held
        seen = builds_of(lambda: [os.getpid()])
        assert [path for path, *_ in seen] == [lock]
        assert give_up_builds(seen) == [], "somebody here holds it"
    lock.unlink()
    lock.touch()  # another machine builds it by now
    assert give_up_builds(seen) == []
    assert lock.exists()
    with lock.open():
        seen = builds_of(lambda: [os.getpid()])
    assert give_up_builds(seen) == ["cpu_adam"]
    assert not lock.exists()


def test_a_process_that_ends_while_it_is_looked_at_does_no_harm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, listed = {str(os.getppid())}, os.listdir

    def vanishing(path: Path) -> list[str]:
        if path.parent.name in gone:
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", vanishing)
    with (home / "open").open("w") as file:
        assert str(Path(file.name).resolve()) in _open_files()


def test_a_young_lock_is_nobodys_fault(home: Path) -> None:
    lock_of("cpu_adam", home, age=STALE_BUILD_SECONDS / 2)
    assert stale_builds() == []


def test_a_long_build_says_what_it_is_doing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("finetune.training.builds.SAID_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("finetune.training.builds.LOOKS_EVERY_SECONDS", 0.01)
    lock = lock_of("async_io", home, age=0)
    with lock.open():  # as its builder has it
        tell_of_builds({"async_io"})
        said = _until("compiling DeepSpeed's async_io", capsys)
    lock.unlink()
    assert "compiled async_io in" in _until("compiled", capsys)
    assert "compiled" not in said


def test_waiting_for_a_build_that_was_killed_is_said_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("finetune.training.builds.SAID_AFTER_SECONDS", 0.0)
    lock = lock_of("cpu_adam", home, age=0)
    tell_of_builds({"cpu_adam"})
    assert f"that no process here is running: a killed one left {lock}" in _until("start again", capsys)


def _until(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    said = ""
    for _ in range(1000):
        said += capsys.readouterr().out
        if words in said:
            return said
        time.sleep(0.01)
    raise AssertionError(said)


CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/tmp"}
LION = {"type": "Lion", "params": {"lr": 1e-4}}


@pytest.mark.parametrize(
    ("config", "has_cuda", "ops"),
    [
        ({"zero_optimization": {"stage": 2}}, False, {"deepspeed_shm_comm"}),
        ({"zero_optimization": {"stage": 2}}, True, set()),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}, True, {"cpu_adam"}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}, "optimizer": LION}, True, {"cpu_lion"}),
        ({"zero_optimization": {"stage": 3, "offload_param": NVME}}, True, {"async_io"}),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {}}}, True, {"fused_adam"}),
        (
            {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
            True,
            set(),
        ),
    ],
    ids=["CPU", "GPU", "offload", "Lion offloaded", "NVMe", "DeepSpeed's Adam", "torch's Adam"],
)
def test_a_run_needs_the_ops_of_its_config(config: dict[str, object], has_cuda: bool, ops: set[str]) -> None:
    assert ops_of(config, has_cuda) == ops
