"""DS6xx: optimizer states and weights offloaded to CPU memory or a disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from pathlib import Path

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.finding import Finding, Put, at, error, warning

BOTH = ("offload_optimizer", "offload_param")
SECTOR_BYTES = 4096  # alignment of O_DIRECT reads and writes on most disks (open(2))


def _here(run: Context) -> Callable[..., Finding]:
    """What this machine lacks is an error for a run that starts here, and a warning for one that may run elsewhere."""
    return error if run.is_here else warning


def offload_fits_the_stage(config: Config, run: Context) -> Iterator[Finding]:
    """DS601 and DS602. deepspeed 0.19.8 offloads optimizer states at stages 1 to 3. At stage 0 it still uses its CPU
    optimizer, whose first step refuses weights on a GPU (ops/adam/cpu_adam.py). To NVMe it offloads at stage 3 alone:
    runtime/zero/stage_1_and_2.py has no swapper, which runtime/engine.py asks for at each save."""
    if config.offload("offload_param") != "none" and config.stage != 3:
        said = (
            f"zero_optimization.offload_param needs stage 3, but stage is {config.stage}. Set stage to 3, or drop it."
        )
        yield error("DS601", "zero_optimization.offload_param", said)
    if config.offload("offload_optimizer") != "none" and config.stage == 0:
        said = (
            "zero_optimization.offload_optimizer needs stage 1 to 3, but stage is 0: nothing is offloaded, and the "
            "CPU optimizer refuses weights on a GPU. Raise it, or drop it."
        )
        yield error("DS602", "zero_optimization.offload_optimizer", said)
    elif config.offload("offload_optimizer") == "nvme" and config.stage in (1, 2):
        said = (
            f"zero_optimization.offload_optimizer.device is nvme, but stage is {config.stage}: DeepSpeed would keep "
            "the states in host memory, and end at the first save. Set stage to 3, or device to cpu."
        )
        yield error("DS602", "zero_optimization.offload_optimizer.device", said)


def offload_has_a_device(config: Config, run: Context) -> Iterator[Finding]:
    """DS609. deepspeed 0.19.8, runtime/zero/offload_config.py: "none" by default, and then the rest is never read."""
    for what in BOTH:
        place = f"zero_optimization.{what}"
        if isinstance(config.get(place), dict) and not config.has(f"{place}.device"):
            said = (
                f'{place} has no device, which is "none" by default: nothing is offloaded. Add "device": "cpu" or '
                '"nvme", or delete the section.'
            )
            yield error("DS609", place, said)


def nvme_has_a_path(config: Config, run: Context) -> Iterator[Finding]:
    """DS603."""
    for what in BOTH:
        place = f"zero_optimization.{what}.nvme_path"
        if config.offload(what) == "nvme" and config.get(place) is None and run.engine != "recipe":
            said = (
                f"zero_optimization.{what}.device is nvme, but nvme_path is not given: DeepSpeed would build the path "
                'from "None". Add "nvme_path" with a folder on the fastest local disk.'
            )
            yield error("DS603", f"zero_optimization.{what}", said)


def nvme_path_is_a_disk(config: Config, run: Context) -> Iterator[Finding]:
    """DS604: a path that cannot be written; DS605: one in memory."""
    for what in BOTH:
        place = f"zero_optimization.{what}.nvme_path"
        asked = config.get(place)
        if asked in (None, "auto"):
            asked = run.nvme_path if run.engine == "recipe" else None
        if config.offload(what) != "nvme" or not isinstance(asked, str):
            continue
        there = _nearest(asked)
        if there is None or not there.is_dir() or not os.access(there, os.W_OK):
            said = f"{place} is {asked}, which is not writable here. Give a writable folder."
            yield _here(run)("DS604", place, said)
        elif _file_system(there) in ("tmpfs", "ramfs"):
            words = (
                f"{place} is {asked}, which is memory ({_file_system(there)}), not a disk: offloaded data would "
                'still take RAM. Give a folder on a disk, or use "device": "cpu".'
            )
            yield warning("DS605", place, words)


def blocks_are_sectors(config: Config, run: Context) -> Iterator[Finding]:
    """DS606."""
    block = config.count("aio.block_size")
    if block is not None and block % SECTOR_BYTES:
        near = max(1, round(block / SECTOR_BYTES)) * SECTOR_BYTES
        said = (
            f"aio.block_size is {block:,}, but direct reads and writes need multiples of {SECTOR_BYTES:,} bytes. Set "
            f"it to {near:,}."
        )
        yield warning("DS606", "aio.block_size", said, Put(at("aio.block_size"), near))


def offload_can_be_built(config: Config, run: Context) -> Iterator[Finding]:
    """DS607. DeepSpeed compiles its CPU optimizer and its disk reader when they are first used."""
    devices = {config.offload(what) for what in BOTH}
    if devices != {"none"} and not compiler():
        said = "offload compiles DeepSpeed's CPU optimizer, but there is no C++ compiler. Install g++."
        yield _here(run)("DS607", "zero_optimization", said)
    if run.has_cuda is False and config.is_on("aio.use_gds"):  # refused as soon as the config is read
        yield error("DS607", "aio.use_gds", "aio.use_gds needs an NVIDIA GPU, and the run has none. Delete it.")
    if "nvme" in devices and not has_libaio():
        said = "NVMe offload needs libaio, which is not installed. Install it: apt-get install libaio-dev."
        yield _here(run)("DS607", "zero_optimization", said)


def buffer_holds_the_largest_weight(config: Config, run: Context) -> Iterator[Finding]:
    """DS608. Weights on a disk pass through buffers of one size (runtime/swap_tensor/partitioned_param_swapper.py)."""
    size = config.count("zero_optimization.offload_param.buffer_size")
    if config.offload("offload_param") != "nvme" or run.weights is None or run.world_size is None:
        return
    size = 100_000_000 if size is None else size
    share = -(-run.weights.largest // run.world_size)
    if share > size:
        place = "zero_optimization.offload_param.buffer_size"
        said = (
            f"{place} is {size:,} elements, but a rank's share of the largest weight has {share:,}. Raise it to "
            f"{share:,}."
        )
        yield error("DS608", place, said, *([Put(at(place), share)] if config.has(place) else []))


def _nearest(asked: str) -> Path | None:
    """The folder, or its nearest existing ancestor; None for a name that cannot be a path here."""
    try:
        path = Path(asked).expanduser()
        while not path.exists() and path != path.parent:
            path = path.parent
    except (OSError, RuntimeError, ValueError):
        return None
    return path


def _file_system(path: Path) -> str:
    """The type of file system, from the longest mount point above `path`; "" if unknown."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    here = path.resolve()
    found = [(len(point), kind) for point, kind in mounts if here.is_relative_to(point)]
    return max(found)[1] if found else ""


def compiler() -> str | None:
    """The path of the C++ compiler."""
    return shutil.which("g++") or shutil.which("c++")


def has_libaio() -> bool:
    """Whether the library that NVMe offload needs is installed."""
    return find_library("aio") is not None
