"""What a run does, really done by two processes and a tiny model: `finetune doctor --deep`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.dsconfig.rules.precision import AMPERE
from finetune.dsconfig.toolchain import compiler, has_libaio
from finetune.host.result import ABSENT, FAILED, OK, Result
from finetune.run.launch import free_port

RANKS = 2
LIMIT_SECONDS = 120
WIDTH = 64


@dataclass(frozen=True)
class Trial:
    """`do` runs on every rank and raises where it fails. `absent` says why it cannot be tried here, or "". `ops` are
    DeepSpeed's compiled ones that it uses."""

    name: str
    do: Callable[[Path], None]
    mend: str
    needed: bool = False
    absent: Callable[[], str] = lambda: ""
    ops: tuple[str, ...] = ()


def run_trials() -> Iterator[Result]:
    """Every trial, each in two processes of its own, so that one that dies takes nothing else with it."""
    import deepspeed  # noqa: F401  (once, for the forked ranks)
    import torch

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # A forked process cannot use a GPU that its parent has looked at.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    ranks = min(RANKS, torch.cuda.device_count() or RANKS)
    for trial in TRIALS:
        if why := trial.absent():
            yield Result(trial.name, ABSENT, why)
            continue
        if said := _build(context, trial.ops):
            yield Result(trial.name, FAILED, said, BUILD, trial.needed)
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="finetune_doctor_") as folder:
            said = _tried(context, trial, ranks, Path(folder))
        seconds = round(time.perf_counter() - start, 1)
        if said is None:
            yield Result(trial.name, OK, f"{ranks} rank(s)", needed=trial.needed, seconds=seconds)
        else:
            yield Result(trial.name, FAILED, said, trial.mend, trial.needed, seconds)


def _build(context: Any, ops: tuple[str, ...]) -> str | None:
    """Compiled once a machine, which takes minutes: by a process that is never killed, for it would leave a lock."""
    answers = context.Queue()
    process = context.Process(target=_compile, args=(ops, answers))
    process.start()
    process.join()
    return answers.get() if process.exitcode == 0 else "the build was ended"


def _compile(ops: tuple[str, ...], answers: Any) -> None:
    _be_quiet()
    answers.put(compile_ops(ops))


def compile_ops(ops: tuple[str, ...]) -> str | None:
    """Compile DeepSpeed's collectives for the CPU and these ops, which takes minutes the first time. None, or what
    failed."""
    from deepspeed.accelerator import get_accelerator

    try:
        for name in ("ShareMemCommBuilder", *ops):
            op = get_accelerator().create_op_builder(name)
            if op is not None and op.is_compatible(False):
                op.load(False)
    except Exception as error:
        return f"an op cannot be built: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return None


def _be_quiet() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _tried(context: Any, trial: Trial, ranks: int, folder: Path) -> str | None:
    """None, or what the first rank that failed said."""
    answers = context.Queue()
    port = str(free_port())
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, trial.name, folder, answers), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _answer(processes, answers)
    finally:  # also where the user ends it
        for process in processes:
            process.kill()
            process.join()


def _answer(processes: list[Any], answers: Any) -> str | None:
    deadline = time.monotonic() + LIMIT_SECONDS
    left = len(processes)
    while left:
        with contextlib.suppress(queue.Empty):
            if said := answers.get(timeout=0.5):
                return str(said)
            left -= 1
            continue
        dead = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
        if dead:
            return (
                f"a rank was ended by {signal.Signals(-dead[0]).name}" if dead[0] < 0 else "a rank ended without a word"
            )
        if time.monotonic() > deadline:
            return f"nothing after {LIMIT_SECONDS} s"
    return None


def _rank(rank: int, ranks: int, port: str, name: str, folder: Path, answers: Any) -> None:
    """One process: quiet, under the variables that a launcher sets."""
    _be_quiet()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    try:
        import deepspeed
        import torch

        torch.set_num_threads(1)
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
        next(trial for trial in TRIALS if trial.name == name).do(folder)
    except BaseException as error:
        words = (str(error).strip().splitlines() or [""])[0][:200]
        answers.put(f"{type(error).__name__}: {words}")
    else:
        answers.put(None)
    answers.close()
    answers.join_thread()
    os._exit(0)


def _all_reduce(folder: Path) -> None:
    import torch
    from torch import distributed

    ranks = distributed.get_world_size()
    here = torch.full((1 << 20,), float(distributed.get_rank() + 1), device=_device())
    distributed.all_reduce(here)
    if not bool((here == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError("the sum is wrong")


def _stage(number: int, **keys: Any) -> Callable[[Path], None]:
    def step(folder: Path) -> None:
        zero = {"stage": number, **{key: _placed(value, folder) for key, value in keys.items()}}
        _train(_engine(zero))

    return step


def _placed(value: Any, folder: Path) -> Any:
    """NVMe goes into the trial's own folder."""
    return {**value, "nvme_path": str(folder)} if isinstance(value, dict) and value["device"] == "nvme" else value


def _engine(zero: dict[str, Any], **keys: Any) -> Any:
    import deepspeed
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 4)]
    on_cpu = zero.get("offload_optimizer")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": _has_bf16()},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **({} if on_cpu else {"torch_adam": True})}},
        "zero_optimization": {"reduce_bucket_size": 100_000, **zero},
        **keys,
    }
    model = torch.nn.Sequential(*layers)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _train(engine: Any, steps: int = 2) -> list[float]:
    import torch

    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        dtype = torch.bfloat16 if _has_bf16() else torch.float32
        rows = torch.randn(2, WIDTH, device=_device(), dtype=dtype)
        loss = torch.nn.functional.cross_entropy(engine(rows).float(), torch.tensor([0, 1], device=_device()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    if not all(loss == loss for loss in losses):
        raise RuntimeError("the loss is no number")
    return losses


def _pipeline(folder: Path) -> None:
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 4)]
    stages = torch.distributed.get_world_size()
    model = PipelineModule(
        layers, num_stages=stages, loss_fn=torch.nn.functional.cross_entropy, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    row = (torch.randn(2, WIDTH), torch.tensor([0, 1]))
    loss = float(engine.train_batch(iter([row, row])))
    if loss != loss:
        raise RuntimeError("the loss is no number")


def _save_and_resume(folder: Path) -> None:
    engine = _engine({"stage": 2})
    _train(engine)
    engine.save_checkpoint(str(folder), tag="trial")
    ahead = _train(engine)
    engine.load_checkpoint(str(folder), tag="trial")
    if _train(engine) != ahead:
        raise RuntimeError("the resumed steps differ from the uncut ones")


def _device() -> str:
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _has_bf16() -> bool:
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= AMPERE


def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU: DeepSpeed's quantizer has no CPU build"


def _no_pair() -> str:
    import torch

    return "needs two GPUs" if torch.cuda.device_count() == 1 else ""


def _no_compiler() -> str:
    return "" if compiler() else "needs a C++ compiler"


def _no_aio() -> str:
    return _no_compiler() or ("" if has_libaio() else "needs libaio: apt-get install libaio-dev")


BUILD = "See the C++ compiler and the CUDA toolkit above; `ds_report` lists what each op needs."
NETWORK = (
    "Ranks of this machine do not reach each other. Look at the firewall of the loopback interface, "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (lo here); NCCL_DEBUG=INFO says more."
)
STEP = "Look at the trials above first; then report it with the output of `finetune doctor --deep --json`."
CPU, DISK = {"device": "cpu"}, {"device": "nvme"}
ON_CPU = ("CPUAdamBuilder",)
ON_DISK = (*ON_CPU, "PinMemoryBuilder", "AsyncIOBuilder")
TRIALS = (
    Trial("all-reduce", _all_reduce, NETWORK, needed=True),
    Trial("ZeRO-0 step", _stage(0), STEP, needed=True),
    Trial("ZeRO-1 step", _stage(1), STEP, needed=True),
    Trial("ZeRO-2 step", _stage(2), STEP, needed=True),
    Trial("ZeRO-3 step", _stage(3), STEP),
    Trial("save and resume", _save_and_resume, STEP, needed=True),
    Trial("CPU offload", _stage(3, offload_optimizer=CPU, offload_param=CPU), BUILD, absent=_no_compiler, ops=ON_CPU),
    Trial("NVMe offload", _stage(3, offload_optimizer=DISK, offload_param=DISK), BUILD, absent=_no_aio, ops=ON_DISK),
    Trial("pipeline", _pipeline, STEP, absent=_no_pair),
    Trial("ZeRO++ hpZ", _stage(3, zero_hpz_partition_size=2), STEP, absent=_no_pair),
    Trial("ZeRO++ qwZ", _stage(3, zero_quantized_weights=True), BUILD, absent=_no_gpu),
    Trial("ZeRO++ qgZ", _stage(3, zero_quantized_gradients=True), BUILD, absent=_no_gpu),
)
