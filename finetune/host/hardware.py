"""This machine's hardware, found without torch; and the memory that the kernel's control groups (cgroup v1 or v2) grant
this process. A limit may be on any ancestor group: Slurm sets a job's limit there."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = re.compile(r"^GPU \d+: (.*?)(?: \(UUID: .*)?$", re.MULTILINE)


def gpus_here() -> int:
    return len(gpu_names())


def gpu_names() -> list[str]:
    return NAME.findall(_nvidia_smi("-L"))


def driver_version() -> str | None:
    found = re.match(r"[\d.]+", _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"))
    return found[0] if found else None


def _nvidia_smi(*asked: str) -> str:
    """nvidia-smi's output, or "" without an NVIDIA driver, which installs it."""
    try:
        return subprocess.run(["nvidia-smi", *asked], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def cores_here() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory in bytes, and GPU names; nothing that identifies the host or the user."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": cpuinfo("model name") or platform.processor() or "unknown",
        "cores": cores_here(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names(),
    }


def cpuinfo(name: str, file: Path = Path("/proc/cpuinfo")) -> str:
    """What Linux says of the first core under `name`; "" if it says nothing, and on other systems."""
    with suppress(OSError):
        lines = file.read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
    return ""


ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED = 2**62  # bytes; v1 expresses it as the largest number of pages (linux/page_counter.h)


@dataclass(frozen=True)
class Granted:
    """A group's memory limit and usage in bytes. Usage excludes inactive file cache, which groups count but the kernel
    reclaims first."""

    bytes: int
    taken: int

    @property
    def free(self) -> int:
        return max(0, self.bytes - self.taken)


def own_group() -> Path:
    """This process's v2 group; in a container it may be the visible root."""
    return next((ROOT / path for kinds, path in _lines() if not kinds), ROOT)


def memory_granted() -> list[Granted]:
    """One entry for each group with a limit: this process's group and its ancestors."""
    found: list[Granted] = []
    for kinds, path in _lines():
        if not kinds:
            found += _granted(ROOT, path, ("memory.max", "memory.current"), "inactive_file")
        elif "memory" in kinds:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _granted(ROOT / "memory", path, names, "total_inactive_file")
    return found


def _lines() -> Iterator[tuple[list[str], str]]:
    """For each hierarchy: its controllers (none in v2), and the path of this process's group."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            yield kinds.split(",") if kinds else [], path.strip("/")


def _granted(root: Path, path: str, names: tuple[str, str], cached: str) -> Iterator[Granted]:
    group = root / path
    # Without a cgroup namespace, a container sees the host's path here, but its own group mounted at the root.
    for folder in (group, *(above for above in group.parents if above.is_relative_to(root))):
        with suppress(OSError, ValueError):  # ValueError: "max", no limit
            limit, used = (int((folder / name).read_text()) for name in names)
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit < UNLIMITED:
                yield Granted(limit, used - int(counts.get(cached, 0)))
