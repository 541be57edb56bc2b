"""GPUs, their driver, and the CUDA that torch was built for."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from finetune.dsconfig.rules.precision import AMPERE
from finetune.host.hardware import driver_version
from finetune.host.result import ABSENT, FAILED, WARNING, Asked, Result, verdict, warned


def gpus(asked: Asked) -> Iterator[Result]:
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        yield _no_gpu(driver, torch)
        return
    architectures, count = torch.cuda.get_arch_list(), torch.cuda.device_count()
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        name = torch.cuda.get_device_name(index)
        found = f"{name}, {memory:.0f} GiB, capability {major}.{minor}, driver {driver or 'unknown'}"
        # Code for sm_80 also runs on 8.6, and compute_80 is compiled for newer GPUs at first use.
        runs = any(serves(architecture, major, minor) for architecture in architectures)
        mend = f"This torch was compiled for {' '.join(architectures)}. Install a build that supports this GPU."
        yield verdict(f"GPU {index}", runs, found, mend)
        if (major, minor) < AMPERE:
            yield Result(f"GPU {index} bf16", WARNING, "before Ampere: no bf16 units", "Train with --fp16 True.")
    apart = [f"{a}-{b}" for a, b in combinations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if count > 1:
        mend = "Collectives go through host memory. Prefer ZeRO-1 or 2 to ZeRO-3; see `nvidia-smi topo -m`."
        found = f"no direct access between {', '.join(apart)}" if apart else "all can access each other directly"
        yield warned("GPU peers", not apart, found, mend)


def _no_gpu(driver: str | None, torch: Any) -> Result:
    if not driver:
        return Result("GPU", ABSENT, "none: runs use the CPU")
    if torch.version.cuda is None:
        mend = "Install a CUDA build of torch: there is a driver, but this build is for CPUs."
        return Result("GPU", FAILED, f"driver {driver}, torch {torch.__version__} without CUDA", mend, needed=True)
    mend = (
        "The driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides the GPUs. Update the driver, or install "
        "an older torch."
    )
    found = f"driver {driver}, torch for CUDA {torch.version.cuda}: no GPU can be used"
    return Result("GPU", FAILED, found, mend, needed=True)


def toolkit(asked: Asked) -> Iterator[Result]:
    """Ops are compiled with the toolkit, and loaded into torch's own CUDA (deepspeedai/DeepSpeed#3223)."""
    import torch

    built = torch.version.cuda
    if built is None:
        return
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    nvcc = shutil.which("nvcc") or (str(usual) if usual.exists() else None)
    if nvcc is None:
        mend = "Needed only for ops that DeepSpeed compiles for the GPU. Install the toolkit, or keep torch_adam: true."
        yield Result("CUDA toolkit", WARNING, f"no nvcc; torch is built for {built}", mend)
        return
    words = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = words.partition("release ")[2].partition(",")[0] or "unknown"
    same = found.split(".")[0] == built.split(".")[0]
    mend = f"Set CUDA_HOME to a toolkit {built.split('.')[0]}.x; DeepSpeed refuses to compile ops with any other."
    yield verdict("CUDA toolkit", same, f"{found}; torch is built for {built}", mend, needed=False)


def collectives(asked: Asked) -> Iterator[Result]:
    import torch
    from torch import distributed

    for name in ["gloo", *(["nccl"] if torch.cuda.is_available() else [])]:
        here = bool(getattr(distributed, f"is_{name}_available")())
        version = f" {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" and here else ""
        mend = f"This torch was built without {name}. Install the standard build."
        yield verdict(name, here, f"in this torch{version}" if here else "missing", mend)


def serves(architecture: str, major: int, minor: int) -> bool:
    """Whether code for `architecture` (sm_80 or compute_80, as in torch.cuda.get_arch_list) runs on this capability."""
    kind, _, number = architecture.partition("_")
    digits = number.rstrip("abcdf")
    if not digits.isdigit():
        return False
    theirs = (int(digits) // 10, int(digits) % 10)
    if kind == "compute":
        return theirs <= (major, minor)
    return theirs[0] == major and theirs[1] <= minor
