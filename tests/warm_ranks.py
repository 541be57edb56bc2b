"""Launches that do not wait for imports: one process imports the stack, and forks the ranks of each launch.

`WarmRanks` starts it (`python tests/warm_ranks.py`) and asks it for launches, a JSON line each. A rank is a process of
its own: fresh state, the environment that its launcher would set, its own words, and the recipe run as `__main__`. What
it does not have is what a launcher does beyond that: torchrun's store in the agent (rank 0 has the store) and
restarts. test_warm_ranks.py holds the environments against those of the true launchers.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[1]
# Read when a library is imported, which has been done: a launch that changes one of them needs a process of its own.
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DEEPSPEED_", "DS_", "TORCH_", "PYTHON")
READ_LATER = ("HF_TOKEN",)
AT_IMPORT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
SHUTDOWN_SECONDS = 30.0  # what deepspeed and torchrun give the ranks that are left after a failure
# Imported by a run at its first use, from within functions.
USED_LATER = """
matplotlib.pyplot sklearn.metrics sklearn.model_selection tensorboard transformers.trainer transformers.models.auto
transformers.models.distilbert.modeling_distilbert transformers.models.resnet.modeling_resnet
transformers.integrations.deepspeed accelerate.utils.deepspeed deepspeed.runtime.engine deepspeed.runtime.pipe.engine
deepspeed.runtime.zero.stage3 deepspeed.runtime.zero.stage_1_and_2 deepspeed.checkpoint torch._dynamo
torch.distributed.run accelerate.commands.launch datasets.packaged_modules.csv.csv datasets.packaged_modules.json.json
""".split()


def is_warm(launcher: str, ranks: int, env: dict[str, str]) -> bool:
    """Whether a launch means the same to ranks that have imported the stack already."""
    if launcher == "accelerate" and ranks == 1:  # which it starts by another road
        return False
    changed = [name for name, value in env.items() if value != AT_IMPORT.get(name)]
    return not any(name.startswith(READ_AT_IMPORT) and name not in READ_LATER for name in changed)


class WarmRanks:
    """The side of the tests: a process that is started with the first launch, and again after one that ran too long."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, launcher: list[str], script: list[str], ranks: int, env: dict[str, str], timeout_seconds: float
    ) -> tuple[int, str]:
        """The exit status and all that was printed. Past the time limit every process of it is killed."""
        process = self._started()
        assert process.stdin
        assert process.stdout
        with tempfile.NamedTemporaryFile() as log:
            request = {"launcher": launcher, "script": script, "ranks": ranks, "env": env, "log": log.name}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            try:
                ready, _, _ = select.select([process.stdout], [], [], timeout_seconds)
                line = process.stdout.readline() if ready else ""
            except BaseException:
                self._kill()
                raise
            output = Path(log.name).read_text(errors="replace")
        if ready and not line:
            self.close()
            raise RuntimeError("the process that imports the stack has died; what it said is above")
        if not line:
            self._kill()
            raise subprocess.TimeoutExpired([*launcher, *script], timeout_seconds, output)
        return int(line), output

    def close(self) -> None:
        if self._process:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            env = {**os.environ, **AT_IMPORT}
            self._process = subprocess.Popen([sys.executable, __file__], cwd=REPO, env=env, **pipes)
        return self._process

    def _kill(self) -> None:
        if self._process:
            kill_family(self._process.pid)
            self.close()


def kill_family(pid: int) -> None:
    """A process and all that came of it."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()


# The side of the ranks


def import_the_stack() -> None:
    """As a launch on CPUs does: `finetune` first, which sets what torch reads, DeepSpeed with its CPU accelerator."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import finetune

    ours = [module.name for module in pkgutil.walk_packages(finetune.__path__, "finetune.")]
    for name in [*ours, *USED_LATER]:
        if not name.endswith("__main__"):
            with suppress(Exception):  # renamed, or an extra that is not installed
                importlib.import_module(name)
    del os.environ["DS_ACCELERATOR"]
    gc.collect()
    gc.freeze()  # a rank's collections leave the pages shared that are there now


def serve() -> str | None:
    """One launch after another; the script to run in a process that has become a rank, None at the end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := sys.stdin.readline():
        launcher = os.fork()
        if launcher == 0:
            answers.close()
            return Launcher(json.loads(line)).run()
        _, how = os.waitpid(launcher, 0)
        print(os.waitstatus_to_exitcode(how), file=answers, flush=True)
    return None


class Launcher:
    """The process between: it starts the ranks of one launch, and ends the others when one has failed."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.command: list[str] = request["launcher"]
        self.name = {sys.executable: "python"}.get(self.command[0], Path(self.command[0]).name)
        self.script: list[str] = request["script"]
        self.world_size: int = request["ranks"]
        self.port = next((port for word, port in pairwise(self.command) if word.endswith("_port")), "")
        os.environ.clear()
        os.environ.update(request["env"])
        with open(os.devnull) as nothing, open(request["log"], "ab") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)

    def run(self) -> str:
        """The script, in a rank. The launcher itself ends in here."""
        for rank, env in enumerate(self.environments()):
            if os.fork() == 0:
                return self.become(rank, env)
        if (status := self.wait()) < 0:
            with suppress(OSError):  # which SIGKILL has anyway
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)  # as plain python ends that a signal has ended
        os._exit(status)

    def environments(self) -> Iterator[dict[str, str]]:
        """Of each rank, what its launcher sets."""
        if self.name == "accelerate":
            os.environ.update(environment_of_accelerate([*self.command[2:], *self.script]))
            yield from self.environments_of_torchrun()
        elif self.name == "torchrun":
            yield from self.environments_of_torchrun()
        elif self.name == "deepspeed":
            yield from self.environments_of_deepspeed()
        else:
            yield {}

    def environments_of_deepspeed(self) -> Iterator[dict[str, str]]:
        """deepspeed 0.19.8, launcher/launch.py, main."""
        size = str(self.world_size)
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "WORLD_SIZE": size, "LOCAL_SIZE": size}
        own |= {
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.world_size))),
        }
        for rank in range(self.world_size):
            yield own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}

    def environments_of_torchrun(self) -> Iterator[dict[str, str]]:
        """torch 2.13, distributed/elastic/agent/server/local_elastic_agent.py, _start_workers; distributed/run.py."""
        size = str(self.world_size)
        own = {"LOCAL_WORLD_SIZE": size, "WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": "1"}
        own |= {"GROUP_RANK": "0", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        own |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"}
        own |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        own |= {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
        if self.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            own["OMP_NUM_THREADS"] = "1"
        for rank in range(self.world_size):
            yield own | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}

    def become(self, rank: int, env: dict[str, str]) -> str:
        os.environ.update(env)
        words = [f"--local_rank={rank}"] if self.name == "deepspeed" else []
        sys.argv = [self.script[0], *words, *self.script[1:]]
        sys.path[0] = str(Path(self.script[0]).resolve().parent)
        import numpy
        import torch

        numpy.random.seed()  # as in a new process
        # Read when its library is loaded, which has been done.
        told = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(told) if told.isdigit() else len(os.sched_getaffinity(0)))
        return self.script[0]

    def wait(self) -> int:
        """The status as the launcher says it, of the first rank that fails; the others are then ended."""
        status, left, asked = 0, self.world_size, None
        while left:
            pid, how = os.waitpid(-1, os.WNOHANG)
            if pid:
                left -= 1
                status = status or os.waitstatus_to_exitcode(how)
            elif status and asked is None:
                asked = time.monotonic()
                self.end_all(signal.SIGTERM)
            elif asked is not None and time.monotonic() - asked > SHUTDOWN_SECONDS:
                self.end_all(signal.SIGKILL)
            time.sleep(0 if pid else 0.02)
        if status and self.name in ("torchrun", "accelerate"):
            return 1
        return status if status >= 0 or self.name == "python" else 256 + status

    def end_all(self, how: signal.Signals) -> None:
        """Ranks and what they have started, as deepspeed's launcher does."""
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(how)


def environment_of_accelerate(words: list[str]) -> dict[str, str]:
    """What `accelerate launch` sets, by its own code: all but the last step, which calls torchrun's."""
    from accelerate.commands import launch
    from torch.distributed import run as torchrun

    found: list[dict[str, str]] = []
    torchrun.run = lambda args: found.append(dict(os.environ))
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    (environment,) = found  # none: a launch of one process goes another way, and is none for warm ranks
    return environment


if __name__ == "__main__":
    import_the_stack()
    if script := serve():
        runpy.run_path(script, run_name="__main__")
