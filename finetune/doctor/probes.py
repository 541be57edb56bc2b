"""Quick probes of the machine. They leave nothing running, bound or written behind."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from finetune.doctor.ops import compilers, locks, ops
from finetune.dsconfig.context import release
from finetune.dsconfig.rules.precision import AMPERE
from finetune.host.hardware import cores_here, cpuinfo, driver_version, memory_granted
from finetune.host.network import hosts, hub, interfaces, meeting_place, names
from finetune.host.result import ABSENT, FAILED, OK, WARNING, Asked, Result, verdict, warned
from finetune.versions import TESTED, version

GIB = 2**30
# The lower bounds in pyproject.toml.
LEAST = {"torch": (2, 6), "transformers": (5, 23), "accelerate": (1, 15), "deepspeed": (0, 19, 4), "datasets": (4,)}
EXTRAS = ("peft", "bitsandbytes", "trl")  # not reported when missing
SMALL_SHM_BYTES = 256 * 2**20  # a container's default is 64 MiB; NCCL and DataLoader workers need more


def look(asked: Asked) -> Iterator[Result]:
    """Run every probe, in the order in which a run would meet the problems."""
    for probe in PROBES:
        start = time.perf_counter()
        try:
            results = list(probe(asked))
        except Exception as error:
            name = probe.__name__.replace("_", " ")
            results = [Result(name, WARNING, f"the check failed: {type(error).__name__}: {error}")]
        for result in results:
            yield Result(**{**vars(result), "seconds": round(time.perf_counter() - start, 2)})


def python(asked: Asked) -> Iterator[Result]:
    fits = (3, 10) <= sys.version_info[:2] <= (3, 13)
    yield verdict("Python", fits, platform.python_version(), "Use Python 3.10 to 3.13, as install.sh does.")


def packages(asked: Asked) -> Iterator[Result]:
    found = {name: version(name) for name in (*LEAST, *EXTRAS)}
    installed = {name: release(text) for name, text in found.items() if text}
    for name, text in found.items():
        if text is None:
            if name in LEAST:
                yield Result(name, FAILED, "is not installed", "Run install.sh.", needed=True)
        elif installed[name] < LEAST.get(name, ()):
            wanted = ".".join(map(str, LEAST[name]))
            yield Result(name, FAILED, text, f"Install {name} {wanted} or later: run install.sh.", needed=True)
        elif (tested := TESTED.get(name)) and installed[name] > release(tested):  # private names may be gone
            mend = f"If a run fails in it, install {name} {tested}: private names that finetune uses may have changed."
            yield Result(name, WARNING, f"{text}, which is newer than the tested release, {tested}", mend)
        else:
            yield Result(name, OK, text, needed=True)


def processor(asked: Asked) -> Iterator[Result]:
    from finetune.training.runtime import BF16_CPU_FLAGS

    quota = []
    with suppress(OSError):
        quota = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    limit = f", {int(quota[0]) / int(quota[1]):.1f} by the container" if quota and quota[0] != "max" else ""
    fast = sorted(BF16_CPU_FLAGS.intersection(cpuinfo("flags").split()))
    bf16 = f"bf16 with {fast[0]}" if fast else "no bf16 units: fp32 is faster here"
    yield Result("CPU", OK, f"{cores_here()} cores{limit}, {bf16}")


def memory(asked: Asked) -> Iterator[Result]:
    size = psutil.virtual_memory()
    total, free = size.total, size.available
    for granted in memory_granted():
        total, free = min(total, granted.bytes), min(free, granted.free)
    mend = "Less than 4 GiB: two ranks with default settings may not fit. Free memory, or use --num_gpus 1."
    yield warned("memory", free >= 4 * GIB, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", mend)
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm")
        found = f"{shared.free / GIB:.2f} of {shared.total / GIB:.2f} GiB free"
        mend = "Start the container with --ipc=host or --shm-size=8g: ranks exchange data there."
        yield verdict("shared memory", shared.free >= SMALL_SHM_BYTES, found, mend)


def limits(asked: Asked) -> Iterator[Result]:
    import resource

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:,.0f} MiB"
    little = locked != resource.RLIM_INFINITY and locked < GIB and driver_version() is not None
    mend = "Offload and RDMA pin host memory. `ulimit -l unlimited`, or docker run --ulimit memlock=-1."
    yield warned("locked memory", not little, found, mend)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield warned("open files", files >= 4096, f"{files:,}", "`ulimit -n 65536`.")


def disks(asked: Asked) -> Iterator[Result]:
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    places = {"temporary files": Path(tempfile.gettempdir()), "run folder": asked.output_dir, "hub cache": cache}
    for name, path in places.items():
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        needed = name != "hub cache"
        if not there.is_dir():
            found = f"{there} is a file, not a folder"
            yield Result(name, FAILED, found, "Give another folder.", needed)
            continue
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        status = FAILED if not writable or free < GIB // 2 else WARNING if free < 5 * GIB else OK
        mend = "" if status == OK else "Free some space, or use another folder: TMPDIR, --output_dir, HF_HOME."
        found = f"{free / GIB:.1f} GiB free at {there}" if writable else f"{there} cannot be written"
        yield Result(name, status, found, mend, needed)


def nvme(asked: Asked) -> Iterator[Result]:
    """Sequential speed, bypassing the page cache, as `finetune plan --calibrate` measures it."""
    folder, another = asked.nvme_path, "Give another --nvme_path."
    if folder is None:
        return
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Result("NVMe folder", FAILED, f"{folder} is not a writable folder", another)
        return
    from finetune.measure.links import DISK_BYTES, disk

    if shutil.disk_usage(folder).free < 2 * DISK_BYTES:
        yield Result("NVMe folder", FAILED, f"{folder} has less than {2 * DISK_BYTES / GIB:.2f} GiB free", another)
        return
    speeds = disk(folder)
    if speeds is None:
        found = f"{folder} is on a file system without O_DIRECT, which offload needs"
        yield Result("NVMe folder", WARNING, found, another)
        return
    writes, reads = speeds.bandwidth_write / 1e9, speeds.bandwidth_read / 1e9
    mend = "Offload waits for the disk in every step: ZeRO-Infinity needs several GB/s. Use CPU offload."
    yield warned("NVMe folder", min(writes, reads) >= 1, f"writes {writes:.1f}, reads {reads:.1f} GB/s", mend)


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


Probe = Callable[[Asked], Iterator[Result]]
PROBES: tuple[Probe, ...] = (
    *(python, packages, gpus, toolkit, collectives, compilers, ops, locks),
    *(processor, memory, limits, disks, nvme, names, hosts, interfaces, meeting_place, hub),
)
