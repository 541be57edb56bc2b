"""What the kernel's control groups grant this process, of version 1 or 2. A limit may stand on any group above its own:
Slurm sets that of a job there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED = 2**62  # bytes; version 1 says so by the largest number of pages (linux/page_counter.h)


@dataclass(frozen=True)
class Granted:
    """Bytes of memory that a group may have, and has: without pages of files that were read once, which the kernel
    takes back first, and which the groups count, too."""

    bytes: int
    taken: int

    @property
    def free(self) -> int:
        return max(0, self.bytes - self.taken)


def own_group() -> Path:
    """Of version 2; in a container it may be the root of what it sees."""
    return next((ROOT / path for kinds, path in _lines() if not kinds), ROOT)


def memory_granted() -> list[Granted]:
    """By each group that has a limit: this process's, and those above it."""
    found: list[Granted] = []
    for kinds, path in _lines():
        if not kinds:
            found += _granted(ROOT, path, ("memory.max", "memory.current"), "inactive_file")
        elif "memory" in kinds:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _granted(ROOT / "memory", path, names, "total_inactive_file")
    return found


def _lines() -> Iterator[tuple[list[str], str]]:
    """Of each hierarchy that this process is in, what it controls, and the path of its group; version 2 names none."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            yield kinds.split(",") if kinds else [], path.strip("/")


def _granted(root: Path, path: str, names: tuple[str, str], cached: str) -> Iterator[Granted]:
    group = root / path
    # Without a namespace of its own a container sees the host's path, and at the root what is its own.
    for folder in (group, *(above for above in group.parents if above.is_relative_to(root))):
        with suppress(OSError, ValueError):  # "max", for no limit
            limit, used = (int((folder / name).read_text()) for name in names)
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit < UNLIMITED:
                yield Granted(limit, used - int(counts.get(cached, 0)))
