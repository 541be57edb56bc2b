"""Detects activity in a process whose main thread stands still. Runs in another thread."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")
OWN = PROC / "self"
IDLE_SHARE = 0.05  # of a core: what a waiting process may use, because its threads poll now and then
# Bytes between two looks that do not count as work. In this process: the watchers read /proc, and rank 0 serves the
# heartbeats (its store reads with read(2), libuv). In a child, or on any one socket: keep-alives only.
OWN_BYTES, OWN_BYTES_A_RANK = 2**16, 2**12
OTHER_BYTES = 2**10
TCP_INFO_BYTES = 120  # linux/tcp.h, struct tcp_info: tcpi_bytes_acked and, after it, tcpi_bytes_received


@dataclass(frozen=True)
class Seen:
    """Counters that only grow while a process lives."""

    at: float
    cpu: dict[int, float]  # seconds by process id; 0 is this process, without its watcher threads
    own_bytes: int
    other_bytes: dict[str, int]  # of each child and of each TCP socket
    waits_for_a_disk: bool


class Movement:
    """Whether this process is active: CPU time of all threads except `watchers`; bytes read and written, including TCP,
    which /proc/PID/io omits; a thread that waits for a disk; and the same for its child processes (a compiler, a data
    loader worker). Call it only while the main thread stands still: listing the processes of a large machine takes
    milliseconds."""

    def __init__(self, ranks: int = 1, watchers_port: int = 0) -> None:
        self.process = psutil.Process()
        self.own_bytes, self.watchers_port = OWN_BYTES + OWN_BYTES_A_RANK * ranks, watchers_port
        self.watchers: set[int] = set()  # native ids
        self.before: Seen | None = None

    def forget(self) -> None:
        """The main thread has moved: start measuring again."""
        self.before = None

    def since_last(self) -> bool:
        before, own_bytes = self.before, _bytes_of(OWN)
        now = self._look()
        self.before = now
        if before is None or now.waits_for_a_disk or before.cpu.keys() != now.cpu.keys():
            return True  # a child has started or ended
        spent = sum(now.cpu.values()) - sum(before.cpu.values())
        if spent > IDLE_SHARE * (now.at - before.at) or own_bytes - before.own_bytes > self.own_bytes:
            return True
        return any(number - before.other_bytes.get(k, 0) > OTHER_BYTES for k, number in now.other_bytes.items())

    def _look(self) -> Seen:
        cpu = {0: sum(t.user_time + t.system_time for t in self.process.threads() if t.id not in self.watchers)}
        others = dict(_sockets(self.watchers_port))
        places = [OWN]
        for child in self.process.children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                times = child.cpu_times()
                cpu[child.pid] = times.user + times.system
                places.append(PROC / str(child.pid))
                others[f"process {child.pid}"] = _bytes_of(places[-1])
        waits = any(_waits_for_a_disk(place) for place in places)
        return Seen(time.monotonic(), cpu, _bytes_of(OWN), others, waits)  # bytes last, after this look's own reads


def _waits_for_a_disk(process: Path) -> bool:
    """State D of proc(5). Covers a long fsync, during which this process moves no bytes."""
    for task in process.glob("task/*/stat"):
        with suppress(OSError, IndexError):  # a thread that has just ended
            if task.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


def _bytes_of(process: Path) -> int:
    """Bytes moved by read(2), write(2) and similar calls: files, pipes and TLS connections."""
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _sockets(without_port: int) -> Iterator[tuple[str, int]]:
    """Bytes carried by each TCP connection of this process, including recv(2) and send(2) (gloo, downloads)."""
    for name in _names(OWN / "fd"):
        with suppress(OSError, struct.error):  # closed meanwhile, or not TCP
            found = os.fstat(int(name))
            if not stat.S_ISSOCK(found.st_mode):
                continue
            copy = os.dup(int(name))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                raise
            with closing(connection):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if without_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    yield f"socket {found.st_ino}", sum(struct.unpack_from("=QQ", info, TCP_INFO_BYTES))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
