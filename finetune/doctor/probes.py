"""Looks at the machine that take a moment each. What they start, bind or write is gone when they end."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from finetune.doctor.releases import known_faults, untested
from finetune.dsconfig.context import release
from finetune.dsconfig.rules.precision import AMPERE
from finetune.dsconfig.toolchain import compiler, has_libaio
from finetune.host.network import hosts, hub, interfaces, meeting_place, names
from finetune.host.result import ABSENT, FAILED, OK, WARNING, Asked, Result

GIB = 2**30
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets")
EXTRAS = ("peft", "bitsandbytes", "trl")  # nothing is said where they are missing
LEAST = {"deepspeed": (0, 19, 4), "transformers": (5,), "torch": (2, 6)}  # pyproject.toml
SMALL_SHM_BYTES = 256 * 2**20  # a container's default is 64 MiB; NCCL and workers of a DataLoader want more
NVCC = "Install the CUDA toolkit that torch was built for, and set CUDA_HOME."
# DeepSpeed's compiled ops: what for, how to get it, and whether it is for GPUs alone.
OPS = {
    "CPUAdam": ("offload of the optimizer", "Install g++, ninja and the Python headers (python3-dev).", False),
    "AsyncIO": ("NVMe offload", "apt-get install libaio-dev.", False),
    "FusedAdam": ("DeepSpeed's AdamW on a GPU", f"{NVCC} Or keep torch_adam: true.", True),
    "Quantizer": ("ZeRO++ qwZ and qgZ", NVCC, True),
}


def look(asked: Asked) -> Iterator[Result]:
    """Every probe, in the order in which a run would meet what it looks at."""
    for probe in PROBES:
        start = time.perf_counter()
        try:
            results = list(probe(asked))
        except Exception as error:
            name = probe.__name__.replace("_", " ")
            results = [Result(name, WARNING, f"could not look: {type(error).__name__}: {error}")]
        for result in results:
            yield Result(**{**vars(result), "seconds": round(time.perf_counter() - start, 2)})


def python(asked: Asked) -> Iterator[Result]:
    here = platform.python_version()
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        yield Result("Python", OK, here, needed=True)
    else:
        yield Result("Python", FAILED, here, "Use Python 3.10, 3.11 or 3.12, as install.sh does.", needed=True)


def packages(asked: Asked) -> Iterator[Result]:
    installed = {}
    for name in PACKAGES + EXTRAS:
        try:
            text = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in EXTRAS:
                continue
            yield Result(name, FAILED, "is not installed", "Run install.sh.", needed=True)
            continue
        installed[name] = release(text)
        least = LEAST.get(name, ())
        if installed[name] < least:
            wanted = ".".join(map(str, least))
            yield Result(name, FAILED, text, f"Take {name} {wanted} or later: run install.sh.", needed=True)
        elif tested := untested(name, installed[name]):
            mend = f"Should a run fail in it, take {name} {tested}. finetune/upstream/ lists what may have changed."
            yield Result(name, WARNING, f"{text}, which is newer than {tested}, the release that was tested", mend)
        else:
            yield Result(name, OK, text, needed=True)
    for known in known_faults(installed):
        names = " with ".join(f"{name} {'.'.join(map(str, installed[name]))}" for name in known.between)
        yield Result("known fault", FAILED, f"{names}: {known.what} ({known.source})", known.mend, needed=True)


def gpus(asked: Asked) -> Iterator[Result]:
    import torch

    driver = _driver()
    if not torch.cuda.is_available():
        if driver and torch.version.cuda is None:
            mend = "Install a CUDA build of torch: the driver is there, and this build is for CPUs."
            yield Result("GPU", FAILED, f"driver {driver}, torch {torch.__version__} without CUDA", mend, needed=True)
        elif driver:
            mend = (
                "The driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides the GPUs. Update the driver, or "
                "take an older torch."
            )
            found = f"driver {driver}, torch for CUDA {torch.version.cuda}: no GPU can be used"
            yield Result("GPU", FAILED, found, mend, needed=True)
        else:
            yield Result("GPU", ABSENT, "none: runs take the CPU")
        return
    architectures = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / GIB
        found = f"{name}, {memory:.0f} GiB, capability {major}.{minor}, driver {driver or 'unknown'}"
        # Code for sm_80 runs on 8.6 too, and compute_80 is compiled for newer ones at the first use.
        runs = any(_serves(architecture, major, minor) for architecture in architectures)
        mend = "" if runs else f"This torch was compiled for {' '.join(architectures)}. Take a build that has this GPU."
        yield Result(f"GPU {index}", OK if runs else FAILED, found, mend, needed=True)
        if (major, minor) < AMPERE:
            yield Result(f"GPU {index} bf16", WARNING, "before Ampere: no bf16 units", "Train with --fp16 True.")
    apart = [
        f"{a}-{b}"
        for a in range(torch.cuda.device_count())
        for b in range(a + 1, torch.cuda.device_count())
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        mend = "Collectives go through host memory. Prefer ZeRO-1 or 2 to ZeRO-3; see `nvidia-smi topo -m`."
        yield Result("GPU peers", WARNING, f"no direct access between {', '.join(apart)}", mend)
    elif torch.cuda.device_count() > 1:
        yield Result("GPU peers", OK, "all reach each other directly")


def toolkit(asked: Asked) -> Iterator[Result]:
    """deepspeedai/DeepSpeed#3223: ops are compiled by the toolkit, and loaded into torch's own CUDA."""
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
    if found.split(".")[0] == built.split(".")[0]:
        yield Result("CUDA toolkit", OK, f"{found}; torch is built for {built}")
    else:
        mend = f"Set CUDA_HOME to a toolkit {built.split('.')[0]}.x; DeepSpeed refuses to compile ops with another one."
        yield Result("CUDA toolkit", FAILED, f"{found}, but torch is built for {built}", mend)


def collectives(asked: Asked) -> Iterator[Result]:
    import torch
    from torch import distributed

    wanted = ["nccl"] if torch.cuda.is_available() else []
    for name in ["gloo", *wanted]:
        here = bool(getattr(distributed, f"is_{name}_available")())
        version = f" {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" and here else ""
        mend = "" if here else f"This torch was built without {name}. Take the usual build."
        yield Result(name, OK if here else FAILED, f"in this torch{version}" if here else "missing", mend, needed=True)


def compilers(asked: Asked) -> Iterator[Result]:
    """deepspeedai/DeepSpeed#1846: CPUAdam fails to build, and the message names a missing attribute."""
    found = compiler()
    mend = "Install g++: DeepSpeed builds its CPU collectives and its CPU optimizer with it. apt-get install g++."
    yield Result("C++ compiler", OK if found else FAILED, found or "none", "" if found else mend, needed=True)
    beside = Path(sys.executable).with_name("ninja")
    ninja = shutil.which("ninja") or (str(beside) if beside.exists() else None)
    yield Result("ninja", OK if ninja else FAILED, ninja or "none", "" if ninja else "pip install ninja.", needed=True)
    header = next(
        (path for path in ("/usr/include/libaio.h", "/usr/local/include/libaio.h") if Path(path).exists()), None
    )
    if header and has_libaio():
        yield Result("libaio", OK, header)
    else:
        yield Result("libaio", WARNING, "none: no NVMe offload", "apt-get install libaio-dev.")


def ops(asked: Asked) -> Iterator[Result]:
    """What DeepSpeed compiles when it is first used, and whether it can here (deepspeedai/DeepSpeed#1846)."""
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
        if builder is not None and builder.is_compatible(False):
            yield Result(f"op {name}", OK, f"{use}: can be built")
        else:
            yield Result(f"op {name}", WARNING, f"{use}: cannot be built", mend)


def locks(asked: Asked) -> Iterator[Result]:
    from finetune.training.runtime import STALE_BUILD_SECONDS, stale_builds

    stale = [str(lock) for lock, _ in stale_builds()]
    if stale:
        mend = f"DeepSpeed waits for them without end. If no build is going on (ps -C ninja): rm {' '.join(stale)}"
        yield Result(
            "compiled ops",
            FAILED,
            f"{len(stale)} lock(s) older than {STALE_BUILD_SECONDS / 60:.0f} minutes",
            mend,
            needed=True,
        )
    else:
        yield Result("compiled ops", OK, "no build was cut off")


def processor(asked: Asked) -> Iterator[Result]:
    from finetune.training.runtime import BF16_CPU_FLAGS

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup("cpu.max")
    limit = ""
    if quota and quota[0] != "max":
        granted = int(quota[0]) / int(quota[1])
        limit = f", {granted:.1f} by the container"
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "").split()
    fast = sorted(BF16_CPU_FLAGS.intersection(flags))
    bf16 = f"bf16 by {fast[0]}" if fast else "no bf16 units: fp32 is faster here"
    yield Result("CPU", OK, f"{cores} cores{limit}, {bf16}")


def memory(asked: Asked) -> Iterator[Result]:
    sizes = {
        words[0].rstrip(":"): int(words[1]) * 1024 for line in _lines("/proc/meminfo") if (words := line.split())[1:]
    }
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    granted, taken = _cgroup("memory.max"), _cgroup("memory.current")
    if granted and granted[0].isdigit() and int(granted[0]) < total:
        total = int(granted[0])
        free = min(free, total - int(taken[0])) if taken else free
    little = free < 4 * GIB
    mend = (
        "Less than 4 GiB: two ranks of the defaults may not fit. Close something, or use --num_gpus 1."
        if little
        else ""
    )
    yield Result("memory", WARNING if little else OK, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", mend)
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm")
        small = size.free < SMALL_SHM_BYTES
        mend = "Start the container with --ipc=host or --shm-size=8g: ranks exchange data there." if small else ""
        found = f"{size.free / GIB:.2f} of {size.total / GIB:.2f} GiB free"
        yield Result("shared memory", FAILED if small else OK, found, mend, needed=True)


def limits(asked: Asked) -> Iterator[Result]:
    import resource

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < GIB and _driver():
        mend = "Offload pins host memory, and RDMA too. `ulimit -l unlimited`, or docker run --ulimit memlock=-1."
        yield Result("locked memory", WARNING, f"{locked / 2**20:.0f} MiB", mend)
    else:
        yield Result(
            "locked memory", OK, "without a limit" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:,.0f} MiB"
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files < 4096
    yield Result("open files", WARNING if few else OK, f"{files:,}", "`ulimit -n 65536`." if few else "")


def disks(asked: Asked) -> Iterator[Result]:
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    places = {"temporary files": Path(tempfile.gettempdir()), "run folder": asked.output_dir, "hub cache": cache}
    for name, path in places.items():
        there = path
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            yield Result(
                name, FAILED, f"{there} is a file, not a folder", "Give another folder.", needed=name != "hub cache"
            )
            continue
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        status = FAILED if not writable or free < GIB // 2 else WARNING if free < 5 * GIB else OK
        mend = "" if status == OK else "Make room, or point elsewhere: TMPDIR, --output_dir, HF_HOME."
        found = f"{free / GIB:.1f} GiB free at {there}" if writable else f"{there} cannot be written"
        yield Result(name, status, found, mend, needed=name != "hub cache")


def nvme(asked: Asked) -> Iterator[Result]:
    """Sequential speed past the page cache, as DeepSpeed's own op reads and writes (O_DIRECT)."""
    folder = asked.nvme_path
    if folder is None:
        return
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Result("NVMe folder", FAILED, f"{folder} is no folder that can be written", "Give another --nvme_path.")
        return
    size, block = 512 * 2**20, 2**20
    if shutil.disk_usage(folder).free < 2 * size:
        yield Result("NVMe folder", FAILED, f"{folder} has less than 1 GiB free", "Give another --nvme_path.")
        return
    import mmap

    buffer = mmap.mmap(-1, block)  # aligned to a page, as O_DIRECT wants
    buffer.write(os.urandom(block))
    path = folder / f".finetune_doctor_{os.getpid()}"
    speeds = []
    try:
        for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDONLY):
            with open(os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600), "rb" if not flags else "wb", 0) as file:
                start = time.perf_counter()
                for _ in range(size // block):
                    if flags & os.O_WRONLY:
                        file.write(buffer)
                    else:
                        file.readinto(buffer)
                os.fsync(file.fileno())
            speeds.append(size / (time.perf_counter() - start) / 1e9)
    finally:
        path.unlink(missing_ok=True)
    slow = min(speeds) < 1
    mend = "Offload waits for it in every step: ZeRO-Infinity wants several GB/s. Use CPU offload." if slow else ""
    yield Result("NVMe folder", WARNING if slow else OK, f"writes {speeds[0]:.1f}, reads {speeds[1]:.1f} GB/s", mend)


Probe = Callable[[Asked], Iterator[Result]]
PROBES: tuple[Probe, ...] = (
    python,
    packages,
    gpus,
    toolkit,
    collectives,
    compilers,
    ops,
    locks,
    processor,
    memory,
    limits,
    disks,
    nvme,
    names,
    hosts,
    interfaces,
    meeting_place,
    hub,
)


def _serves(architecture: str, major: int, minor: int) -> bool:
    """sm_80 and compute_80, as torch.cuda.get_arch_list names them; sm_90a serves 9.0 alone."""
    kind, _, number = architecture.partition("_")
    digits = number.rstrip("abcdf")
    if not digits.isdigit():
        return False
    theirs = (int(digits) // 10, int(digits) % 10)
    if kind == "compute":
        return theirs <= (major, minor)
    return theirs[0] == major and theirs[1] <= minor


def _driver() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _cgroup(name: str) -> list[str]:
    lines = _lines(f"/sys/fs/cgroup/{name}")
    return lines[0].split() if lines else []
