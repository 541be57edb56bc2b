"""Environment variables left over in a shell or set by hand, which libraries obey. A run obeys each one and says so, or
refuses it. Also the environment of child processes. Never imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.run.launch import is_on
from finetune.run.run import Run

if TYPE_CHECKING:
    import psutil

PRECISION, CPU = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"
PRECISIONS = ("no", "bf16", "fp16")
# Engines that recipes do not support, under any launcher, and other variables that change a run (accelerate 1.15,
# state.py, accelerator.py; transformers 5.23, training_args.py, _setup_devices).
SWITCHES = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
SAGEMAKER, DYNAMO = "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "ACCELERATE_DYNAMO_BACKEND"
DEVICE = "ACCELERATE_TORCH_DEVICE"
# These decide whether a GPU rounds fp32 matrix products: NVIDIA's libraries obey the first whatever --tf32 says (its
# page on TF32), and torch uses the second as its default (ATen/Context.h); older NGC images set it.
TF32 = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
# Accelerate uses these to fill each "auto" of a DeepSpeed config that is given by flag (1.15, utils/dataclasses.py,
# DeepSpeedPlugin.__post_init__).
OF_DEEPSPEED_PLUGIN = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_")


def left_over(run: Run, deepspeed: str | None) -> Iterator[str]:
    """Errors in the environment of a run; `deepspeed` names its DeepSpeed config, if any."""
    yield from _of_any_launcher(run)
    if run.launch.launcher == "accelerate":
        return
    told = "accelerate launch did not start this run"
    if is_on("ACCELERATE_USE_DEEPSPEED") and not deepspeed:
        yield f"{_said('ACCELERATE_USE_DEEPSPEED')}, but {told}. Unset it, or give --deepspeed."
    if is_on("ACCELERATE_USE_FSDP") and not run.value("fsdp"):
        yield f"{_said('ACCELERATE_USE_FSDP')}, but {told}. Unset it, or give --fsdp."
    fields = [name for name in sorted(os.environ) if deepspeed and name.startswith(OF_DEEPSPEED_PLUGIN)]
    if run.value("fsdp"):
        fields += [name for name in sorted(os.environ) if name.startswith("FSDP_")]
    if _backend() and not run.value("torch_compile"):
        yield f"{_said(DYNAMO)}, but {told}. Unset it, or give --torch_compile True."
    for name in fields:
        yield f"{_said(name)}, but {told}: it would override the flags. Unset it."


def _of_any_launcher(run: Run) -> Iterator[str]:
    for name in filter(is_on, SWITCHES):
        yield f"{_said(name)}: recipes train with DeepSpeed, FSDP or DDP. Unset it, or change accelerate's config."
    if is_on("ACCELERATE_USE_SAGEMAKER") and os.environ.get(SAGEMAKER, "NO").upper() != "NO":
        yield f"{_said(SAGEMAKER)}: recipes train with DeepSpeed, FSDP or DDP. Set it to NO."
    if os.environ.get(DEVICE, ""):
        yield f"{_said(DEVICE)}, which recipes do not support. Unset it; --use_cpu selects the CPU."
    if is_on(CPU) and run.given.get("use_cpu") is False:
        yield f"{_said(CPU)}, but {run.said('use_cpu')}. Unset it, or drop the flag."
    if precision() not in PRECISIONS:
        yield f"{_said(PRECISION)}, but it must be one of {', '.join(PRECISIONS)}."


def precision() -> str:
    """The value of accelerate's variable; "no" if it is not set."""
    return os.environ.get(PRECISION, "no").lower()


def path_of_programs() -> str:
    """PATH for child processes: programs are searched for beside this Python first, which also finds them if its
    environment is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _backend() -> str:
    """The backend of torch.compile in accelerate's variable; "" for none."""
    found = os.environ.get(DYNAMO, "no").lower()
    return "" if found == "no" else found


def obeyed(run: Run) -> Run:
    """The run with what the environment asks for, and notes that say so."""
    if is_on(CPU) and "use_cpu" not in run.given:
        run = run.settled(f"{CPU} in the environment", use_cpu=True)
        run = run.noted(f"{_said(CPU)}, so this run uses only the CPU.")
    if run.launch.launcher == "accelerate" and _backend() and not run.value("torch_compile"):
        run = run.settled("accelerate's config", torch_compile=True, torch_compile_backend=_backend())
        run = run.noted(f"{_said(DYNAMO)}, so the model is compiled.")
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if run.launch.launcher == "python" and tasks != "1":
        run = run.noted(
            f"this is one of {tasks} tasks of a Slurm step, and each trains separately. For one run across "
            "all of them, let srun start torchrun (recipes/launch/slurm.sbatch)."
        )
    if run.launch.launcher != "accelerate" and precision() != "no":
        run = run.noted(f"{_said(PRECISION)}; --bf16, --fp16 and a DeepSpeed config that states one override it.")
    for name in TF32 if not run.value("use_cpu") else ():
        if name in os.environ:
            run = run.noted(f"{_said(name)}: on a GPU it affects whether fp32 matrix products are rounded to TF32.")
    return run


def _said(name: str) -> str:
    return f"{name} is {os.environ[name]!r} in the environment"


def environment_of_child() -> dict[str, str]:
    """An environment in which Python imports what this process can, and nothing from the current folder: `-m` and `-c`
    would look there first, and a stranger's torch.py may be there. Python 3.10 ignores PYTHONSAFEPATH and does look."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """The living processes with this in their environment: all descendants of a process that was started so, orphans
    and those in sessions of their own included, as torchrun's ranks are."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
