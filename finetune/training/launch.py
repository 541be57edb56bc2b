"""What a launcher tells its processes, and how a recipe's `main` ends: one rank speaks. Never imports torch."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from finetune.errors import FinetuneError, InterruptedRunError, NothingToDoError
from finetune.privacy import without_home

SILENT_RANK_WAITS_SECONDS = 20.0
INTERRUPTED_RANK_WAITS_SECONDS = 60.0  # while rank 0 tells its trackers; its end is that of the others
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


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


def read_launch() -> Launch:
    """From the environment that torchrun, `accelerate launch` and the deepspeed launcher set up.

    deepspeed/launcher/launch.py sets CROSS_SIZE and LOCAL_SIZE; accelerate's marks are ACCELERATE_*; all set RANK.
    """
    env = os.environ
    if "RANK" not in env:
        return Launch()
    world = int(env.get("WORLD_SIZE", "1"))
    local_world = int(env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or world)
    if "ACCELERATE_MIXED_PRECISION" in env or "ACCELERATE_USE_DEEPSPEED" in env:
        launcher = "accelerate"
    else:
        launcher = "deepspeed" if "CROSS_SIZE" in env else "torchrun"
    return Launch(int(env["RANK"]), int(env.get("LOCAL_RANK", "0")), world, local_world, launcher)


def free_port() -> int:
    """A port of this machine that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_as_single_process() -> None:
    """Give plain `python` the variables of a launch of one, which DeepSpeed would look for by MPI otherwise."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = str(free_port())
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main` and end the process: 0 done, 1 the run failed, 2 the request was wrong, 75 a signal asked
    it to stop or its predecessor still had the folder, 130 Ctrl-C.

    Every rank meets the same fault in the request, and rank 0 alone says it. The others wait for the launcher to end
    them, which it does as soon as rank 0 has; ending first, they would have rank 0 killed before it spoke. A rank whose
    fault rank 0 does not share speaks once it has waited in vain.
    """
    launch = read_launch()
    try:
        main()
    except KeyboardInterrupt:
        if launch.speaks:
            print(
                "\nstopped. Where a checkpoint was saved, --resume auto goes on from it.", file=sys.stderr, flush=True
            )
        os._exit(INTERRUPTED)
    except InterruptedRunError as error:  # which has been said
        if not launch.speaks:
            time.sleep(INTERRUPTED_RANK_WAITS_SECONDS)
        os._exit(error.exit_status)
    except NothingToDoError as error:
        if launch.speaks:
            print(without_home(str(error)), flush=True)
        os._exit(error.exit_status)
    except FinetuneError as error:
        prefix = ""
        if not launch.speaks:
            time.sleep(SILENT_RANK_WAITS_SECONDS)
            prefix = f"[rank {launch.rank}] "
        print(f"\n{prefix}error: {without_home(str(error))}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(error.exit_status)  # no atexit hook may hang on a collective that the other ranks have left
    if not launch.speaks:
        # Nothing is left to do but to tear down threads of gloo and of libraries, over which a rank has been seen to
        # die ("terminate called without an active exception"), and with it a run that was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
