"""The memory that the kernel's control groups (cgroup v1 or v2) grant this process. A limit may be on any ancestor
group: Slurm sets a job's limit there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
