"""How much memory this process may have is the least that a control group on its way to the root grants."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from finetune.doctor import probes
from finetune.host import hardware as control_group
from finetune.host.hardware import Granted, memory_granted, own_group
from finetune.host.result import Asked
from finetune.training.checkpoints.space import free_memory

GIB = 2**30
UNLIMITED = 9223372036854771712  # as version 1 says it
V1, V2 = "memory.limit_in_bytes memory.usage_in_bytes total_inactive_file", "memory.max memory.current inactive_file"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_group, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_group, "OWN", tmp_path / "own")
    return tmp_path / "cgroup"


def put(own: str, folder: Path, names: str, limit: int | str, used: int, cached: int = 0) -> None:
    limit_name, used_name, cached_name = names.split()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{cached_name} {cached}\n")
    control_group.OWN.write_text(own)


def test_a_limit_above_its_own_group_holds(root: Path) -> None:
    own = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
    task = root / "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    put(own, task, V2, "max", GIB)
    put(own, task.parents[2], V2, 4 * GIB, 3 * GIB, cached=GIB)  # job_7
    put(own, task.parents[3], V2, 64 * GIB, 5 * GIB)
    assert memory_granted() == [Granted(4 * GIB, 2 * GIB), Granted(64 * GIB, 5 * GIB)]
    assert own_group() == task
    assert free_memory() == min(2 * GIB, psutil.virtual_memory().available)


def test_version_1_is_read_too(root: Path) -> None:
    own = "5:memory:/slurm/uid_1/job_7\n4:cpu,cpuacct:/slurm\n0::/\n"
    put(own, root / "memory/slurm/uid_1/job_7", V1, GIB, 100)
    put(own, root / "memory/slurm/uid_1", V1, UNLIMITED, 2 * GIB)
    assert memory_granted() == [Granted(GIB, 100)]
    assert free_memory() == min(GIB - 100, psutil.virtual_memory().available)


def test_a_container_that_is_named_by_the_hosts_path_finds_its_own_at_the_root(root: Path) -> None:
    put("0::/docker/0123\n", root, V2, GIB, 100)
    assert memory_granted() == [Granted(GIB, 100)]


def test_nothing_is_found_where_there_is_nothing(root: Path) -> None:
    assert memory_granted() == []
    assert free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_doctor_says_what_the_groups_leave(root: Path, tmp_path: Path) -> None:
    put("0::/job/step\n", root / "job", V2, GIB, GIB - 2**28)
    (root / "job/step").mkdir()
    asked = Asked(output_dir=tmp_path, nvme_path=None, hostfile=None, port=29400)
    assert next(iter(probes.memory(asked))).found == "0.2 of 1.0 GiB free"
