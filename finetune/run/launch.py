"""What a launcher tells its processes through the environment. Never imports torch."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from finetune.errors import RequestError

COUNT = re.compile(r"[0-9]{1,9}")
OF_ACCELERATE = ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_CONFIG_DS_FIELDS")
ON = ("1", "true", "t", "yes", "y", "on")  # accelerate 1.15, utils/environment.py, str_to_bool
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
LAUNCH = (
    "Launch with `torchrun --nproc_per_node N`, `deepspeed` or `accelerate launch`, which set these variables; for a "
    "single process, unset them."
)


@dataclass(frozen=True)
class Launch:
    """This process's place among the others. The defaults are for plain `python`."""

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
        """True for a node's leading rank and for one of the ranks that wait for it."""
        return self.local_rank in (0, 1)


def read_launch() -> Launch:
    """Read the environment that torchrun, `accelerate launch` and the deepspeed launcher set up. Raises RequestError
    if the variables do not describe a launch, or if libraries would interpret them differently.

    deepspeed/launcher/launch.py sets CROSS_SIZE and LOCAL_SIZE. accelerate (1.15, utils/launch.py) always sets its
    precision, which people also export, and OF_ACCELERATE with it. All set RANK, except accelerate with one process.
    """
    env = os.environ
    if "RANK" not in env:
        _refuse_without_rank()
        return Launch()
    rank, world = _count("RANK"), _count("WORLD_SIZE", 1)
    local_rank = _count("LOCAL_RANK", 0)
    by_deepspeed = "CROSS_SIZE" in env and env.get("LOCAL_SIZE")
    local_size = "LOCAL_WORLD_SIZE" if env.get("LOCAL_WORLD_SIZE") and not by_deepspeed else "LOCAL_SIZE"
    local_world = _count(local_size, world) if env.get(local_size) else world
    for name, number, size, of in (
        ("RANK", rank, "WORLD_SIZE", world),
        ("LOCAL_RANK", local_rank, local_size, local_world),
        (local_size, local_world - 1, "WORLD_SIZE", world),
    ):
        if number >= of:
            raise RequestError(
                f"{name} is {env.get(name, number)} in the environment, but {size} is {env.get(size, of)}. {LAUNCH}"
            )
    if "ACCELERATE_MIXED_PRECISION" in env and any(name in env for name in OF_ACCELERATE):
        launcher = "accelerate"
    else:
        launcher = "deepspeed" if "CROSS_SIZE" in env else "torchrun"
    return Launch(rank, local_rank, world, local_world, launcher)


def meeting_faults(launch: Launch) -> Iterator[str]:
    """The variables that a rank needs to find the other ranks, if missing or invalid."""
    if "RANK" not in os.environ or launch.world_size == 1:
        return
    lacking = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if lacking:
        yield (
            f"RANK is {launch.rank} and WORLD_SIZE is {launch.world_size} in the environment, without "
            f"{' and '.join(lacking)}, where the ranks meet. Set what is missing, launch with `torchrun "
            "--nproc_per_node N`, or unset RANK and WORLD_SIZE for a run of one process."
        )
    port = os.environ.get("MASTER_PORT") or "1"
    if not (COUNT.fullmatch(port) and 0 < int(port) < 2**16):
        yield f"MASTER_PORT is {port!r} in the environment, but a port is a whole number from 1 to 65535."


def own_rank() -> int:
    """This process's rank, even if the other variables describe no launch; 0 for a process that must report itself."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    is_one_of_many = COUNT.fullmatch(rank) and not (COUNT.fullmatch(world or "1") and int(rank) >= int(world or "1"))
    return int(rank) if is_one_of_many else 0


def _count(name: str, otherwise: int | None = None) -> int:
    told = os.environ.get(name)
    if told is None and otherwise is not None:
        return otherwise
    if not COUNT.fullmatch(told or ""):
        raise RequestError(f"{name} is {told!r} in the environment, but it must be a whole number. {LAUNCH}")
    return int(told or "")


def _refuse_without_rank() -> None:
    """Accelerate reads these variables without RANK, and would wait for ranks that nothing else here knows of (1.15,
    state.py, _prepare_backend)."""
    for name in ("LOCAL_RANK", *SIZES):
        told = os.environ.get(name, "")
        if told not in ("", "-1") and not (name in SIZES and told == "1"):
            raise RequestError(f"{name} is {told!r} in the environment, without RANK. {LAUNCH}")


def accelerate_uses_deepspeed() -> bool:
    """Whether `accelerate launch` has DeepSpeed in its config or flags."""
    return is_on("ACCELERATE_USE_DEEPSPEED")


def accelerate_uses_fsdp() -> bool:
    """Whether `accelerate launch` has FSDP in its config or flags."""
    return is_on("ACCELERATE_USE_FSDP")


def is_on(name: str) -> bool:
    """Whether accelerate reads this environment variable as true."""
    return os.environ.get(name, "").lower() in ON


def free_port() -> int:
    """A port that is free now, below Linux's ephemeral range (`net.ipv4.ip_local_port_range`).

    An ephemeral port may be taken by another process before the launcher binds it, seconds later.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def join_as_single_process() -> None:
    """Set the variables of a single-process launch for plain `python`; otherwise DeepSpeed would query MPI. Variables
    left over from another launch would make it wait elsewhere, for other ranks."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = str(free_port())
    os.environ.update(alone)
