"""This machine's hardware, found without torch."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

NAME = re.compile(r"^GPU \d+: (.*?)(?: \(UUID: .*)?$", re.MULTILINE)


def gpus_here() -> int:
    return len(gpu_names())


def gpu_names() -> list[str]:
    return NAME.findall(_nvidia_smi("-L"))


def driver_version() -> str | None:
    found = re.match(r"[\d.]+", _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"))
    return found[0] if found else None


def _nvidia_smi(*asked: str) -> str:
    """nvidia-smi's output, or "" without an NVIDIA driver, which installs it."""
    try:
        return subprocess.run(["nvidia-smi", *asked], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def cores_here() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory in bytes, and GPU names; nothing that identifies the host or the user."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores_here(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
