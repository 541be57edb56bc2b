"""What is said of machines that lack something."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from finetune.doctor import ops, probes
from finetune.doctor.probes import look
from finetune.dsconfig.context import release
from finetune.host import network
from finetune.host.result import ABSENT, FAILED, OK, WARNING, Asked, Result
from finetune.training import builds
from finetune.versions import TESTED


def asked(tmp_path: Path, **changes: Any) -> Asked:
    known: dict[str, Any] = {"output_dir": tmp_path, "nvme_path": None, "hostfile": None, "port": 29400}
    return Asked(**{**known, **changes})


def found(results: Any, name: str) -> Result:
    return next(result for result in results if result.name == name)


def test_every_probe_gives_an_answer_here_and_every_fault_a_mend(tmp_path: Path) -> None:
    results = list(look(asked(tmp_path)))
    assert {"Python", "torch", "deepspeed", "gloo", "C++ compiler", "memory", "hub token"} <= {r.name for r in results}
    assert [result for result in results if "the check failed" in result.found] == []
    assert [result.name for result in results if result.status in (FAILED, WARNING) and not result.mend] == []


def test_a_probe_that_breaks_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(asked: Asked) -> Any:
        raise OSError("no such thing")

    monkeypatch.setattr(probes, "PROBES", (broken, probes.python))
    first, second = look(asked(tmp_path))
    assert (first.status, first.found) == (WARNING, "the check failed: OSError: no such thing")
    assert second.name == "Python"


def test_the_least_releases_are_those_of_pyproject() -> None:
    bounds = re.findall(r'^    "([a-z]+)>=([0-9.]+)', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    least = {name: release(bound) for name, bound in bounds if name in probes.LEAST}
    assert least == probes.LEAST


def test_a_release_newer_than_the_one_tested_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**TESTED, "transformers": "5.24.0", "torch": "2.13.0+cu130"}
    monkeypatch.setattr(probes, "version", versions.__getitem__)
    told = {result.name: (result.status, result.found) for result in probes.packages(asked(tmp_path))}
    assert told.pop("transformers") == (WARNING, "5.24.0, which is newer than the tested release, 5.23.0")
    assert {status for status, _ in told.values()} == {OK}


def test_a_lock_that_nobody_holds_is_named_with_the_command_that_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "py311_cpu" / "async_io" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (result,) = ops.locks(asked(tmp_path))
    assert result.status == OK, "a build that goes on is nobody's fault"
    long_ago = time.time() - builds.STALE_BUILD_SECONDS - 1
    os.utime(lock, (long_ago, long_ago))
    (result,) = ops.locks(asked(tmp_path))
    assert (result.status, result.needed) == (FAILED, True)
    assert f"rm {lock}" in result.mend


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        result = found(network.names(asked(tmp_path, port=port)), "rendezvous port")
    assert result.status == WARNING
    assert f"--master_port {port + 1}" in result.mend


def test_hosts_that_cannot_be_reached_are_named(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens on 127.0.0.77, port 22
        hostfile.write_text("# ours\nno.such.host.invalid slots=8\n127.0.0.77 slots=8\n")
        nowhere, silent = network.hosts(asked(tmp_path, hostfile=hostfile))
    assert "has no address" in nowhere.found
    assert "ssh does not answer" in silent.found
    assert "--no_ssh" in silent.mend
    assert {nowhere.status, silent.status} == {FAILED}
    hostfile.write_text("worker-1 8\n")
    for path in (hostfile, tmp_path / "none"):
        (unreadable,) = network.hosts(asked(tmp_path, hostfile=path))
        assert unreadable.needed
        assert "slots=8" in unreadable.found


def test_an_interface_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    (result,) = network.interfaces(asked(tmp_path))
    assert result.status == FAILED
    assert "there is no interface eth77" in result.found
    assert "lo" in result.mend
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (result,) = network.interfaces(asked(tmp_path))
    assert result.status == OK


def test_the_meeting_place_is_this_host_or_has_no_address(tmp_path: Path) -> None:
    (here,) = network.meeting_place(asked(tmp_path, master_addr="127.0.0.1"))
    assert here.status == OK
    (nowhere,) = network.meeting_place(asked(tmp_path, master_addr="no.such.host.invalid"))
    assert nowhere.status == FAILED
    assert "has no address" in nowhere.found


def test_a_disk_for_offload_is_timed_and_left_clean(tmp_path: Path) -> None:
    (result,) = probes.nvme(asked(tmp_path, nvme_path=tmp_path))
    assert "GB/s" in result.found
    assert list(tmp_path.iterdir()) == []
    (missing,) = probes.nvme(asked(tmp_path, nvme_path=tmp_path / "none"))
    assert missing.status == FAILED


def test_too_little_shared_memory_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda path: usage(64 * 2**20, 0, 64 * 2**20))
    result = found(probes.memory(asked(tmp_path)), "shared memory")
    assert (result.status, result.needed) == (FAILED, True)
    assert "--ipc=host" in result.mend


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "says"),
    [(None, None, ABSENT, ""), ("550.54", None, FAILED, "CUDA build"), ("450.1", "13.0", FAILED, "too old")],
)
def test_a_driver_without_its_torch_is_named(
    driver: str | None, cuda: str | None, status: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU that works")
    monkeypatch.setattr(probes, "driver_version", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (result,) = probes.gpus(asked(tmp_path))
    assert result.status == status
    assert says in result.mend


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = found(probes.disks(asked(tmp_path, output_dir=tmp_path / "file" / "run")), "run folder")
    assert (result.status, result.needed) == (FAILED, True)


def test_compiled_code_serves_the_gpus_that_it_is_for() -> None:
    assert probes.serves("sm_80", 8, 6)
    assert not probes.serves("sm_86", 8, 0)
    assert not probes.serves("sm_80", 9, 0)
    assert probes.serves("compute_80", 9, 0), "compiled at the first use"
    assert probes.serves("sm_90a", 9, 0)
    assert not probes.serves("gfx90a", 9, 0)


def test_a_token_is_present_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://user:hf_secret@127.0.0.1:9")
    results = list(network.hub(asked(tmp_path)))
    assert found(results, "hub token").found == "present"
    assert found(results, "hub").status == WARNING
    assert "hf_secret" not in str(results)
