"""What a launcher tells its processes. Never imports torch."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Where this process stands among the others. The defaults are those of plain `python`."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: str = "python"  # "python", "deepspeed", "accelerate" or "torchrun"

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    @property
    def leads_its_node(self) -> bool:
        return self.local_rank == 0

    @property
    def tells_of_waiting(self) -> bool:
        """Of a node's ranks the one that leads, and one of those that wait for it."""
        return self.local_rank in (0, 1)


def read_launch() -> Launch:
    """From the environment that torchrun, `accelerate launch` and the deepspeed launcher set up.

    deepspeed/launcher/launch.py sets CROSS_SIZE and LOCAL_SIZE; accelerate always sets
    ACCELERATE_MIXED_PRECISION (utils/launch.py; ACCELERATE_USE_DEEPSPEED is also set by us); all set RANK.
    """
    env = os.environ
    if "RANK" not in env:
        return Launch()
    world = int(env.get("WORLD_SIZE", "1"))
    local_world = int(env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or world)
    if "ACCELERATE_MIXED_PRECISION" in env:
        launcher = "accelerate"
    else:
        launcher = "deepspeed" if "CROSS_SIZE" in env else "torchrun"
    return Launch(int(env["RANK"]), int(env.get("LOCAL_RANK", "0")), world, local_world, launcher)


def accelerate_uses_deepspeed() -> bool:
    """True under `accelerate launch` with DeepSpeed in its config or flags."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def accelerate_uses_fsdp() -> bool:
    """True under `accelerate launch` with FSDP in its config or flags."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def free_port() -> int:
    """A port that nobody has now, below those that Linux gives away by itself (`net.ipv4.ip_local_port_range`).

    One of those may be another process's by the time that the launcher takes it, seconds later.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def join_as_single_process() -> None:
    """Give plain `python` the variables of a launch of one, which DeepSpeed would look for by MPI otherwise."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = str(free_port())
    for name, value in alone.items():
        os.environ.setdefault(name, value)
