"""Where figures come from: machine and revision. Nothing that names a host or a user."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from finetune.host.hardware import cores_here, gpu_names

ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory in bytes, and GPUs by name."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores_here(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names(),
    }


def revision() -> str:
    """Of the toolkit's checkout, with -dirty where files differ from it; "unknown" outside of one."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
