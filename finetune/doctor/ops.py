"""The ops that DeepSpeed compiles at first use: whether they can be built here, and interrupted builds.

python -m finetune.doctor.ops CPUAdamBuilder      # builds it, which takes minutes the first time
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from finetune.dsconfig.rules.offload import compiler, has_libaio
from finetune.host.result import ABSENT, Asked, Result, verdict, warned
from finetune.run.environment import environment_of_child

NVCC = "Install the CUDA toolkit that torch was built for, and set CUDA_HOME."
# What it is for, how to get it, and whether it is only for GPUs.
OPS = {
    "CPUAdam": ("offload of the optimizer", "Install g++, ninja and the Python headers (python3-dev).", False),
    "AsyncIO": ("NVMe offload", "apt-get install libaio-dev.", False),
    "FusedAdam": ("DeepSpeed's AdamW on a GPU", f"{NVCC} Or keep torch_adam: true.", True),
    "Quantizer": ("ZeRO++ qwZ and qgZ", NVCC, True),
}
ON_CPU = ("CPUAdamBuilder",)
ON_DISK = (*ON_CPU, "PinMemoryBuilder", "AsyncIOBuilder")


def compilers(asked: Asked) -> Iterator[Result]:
    """Without a compiler CPUAdam fails to build, with a misleading error (deepspeedai/DeepSpeed#1846)."""
    gxx = compiler()
    mend = "Install g++: DeepSpeed builds its CPU collectives and its CPU optimizer with it. apt-get install g++."
    yield verdict("C++ compiler", gxx is not None, gxx or "none", mend)
    beside = Path(sys.executable).with_name("ninja")
    ninja = shutil.which("ninja") or (str(beside) if beside.exists() else None)
    yield verdict("ninja", ninja is not None, ninja or "none", "pip install ninja.")
    header = next((path for path in ("/usr/include", "/usr/local/include") if Path(path, "libaio.h").exists()), None)
    there = bool(header and has_libaio())
    found = f"{header}/libaio.h" if there else "none: no NVMe offload"
    yield warned("libaio", there, found, "apt-get install libaio-dev.")


def ops(asked: Asked) -> Iterator[Result]:
    """Whether each op can be compiled here (deepspeedai/DeepSpeed#1846)."""
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    for name, (use, mend, on_gpu) in OPS.items():
        if on_gpu and not has_gpu:
            yield Result(f"op {name}", ABSENT, f"{use}: needs a GPU")
            continue
        builder = get_accelerator().create_op_builder(f"{name}Builder")
        fits = builder is not None and builder.is_compatible(False)
        yield warned(f"op {name}", fits, f"{use}: {'can' if fits else 'cannot'} be built", mend)


def locks(asked: Asked) -> Iterator[Result]:
    from finetune.training.builds import STALE_BUILD_SECONDS, stale_builds

    stale = [str(lock) for lock, _ in stale_builds()]
    old = f"{len(stale)} lock(s) older than {STALE_BUILD_SECONDS / 60:.0f} minutes"
    found = old if stale else "no build was interrupted"
    mend = f"DeepSpeed waits for them forever. If no build is running (ps -C ninja): rm {' '.join(stale)}"
    yield verdict("compiled ops", not stale, found, mend)


def build(names: Sequence[str]) -> str | None:
    """Compile DeepSpeed's CPU collectives and these ops in a separate process, without a timeout: killing it would
    leave a lock behind."""
    command = [sys.executable, "-m", "finetune.doctor.ops", *names]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=environment_of_child()
    )
    last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
    return f"an op cannot be built: {last[:400]}" if done.returncode else None


def compile_ops(names: Sequence[str]) -> None:
    """Compile in this process, with much output on stdout. Raises RequestError for an op with an interrupted build."""
    from deepspeed.accelerator import get_accelerator

    from finetune.training.builds import refuse_stale_builds

    for name in ("ShareMemCommBuilder", *names):
        op = get_accelerator().create_op_builder(name)
        if op is not None and op.is_compatible(False):
            refuse_stale_builds({op.name})
            op.load(False)


def main(names: Sequence[str]) -> None:
    from finetune.errors import RequestError

    try:
        compile_ops(names)
    except RequestError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
