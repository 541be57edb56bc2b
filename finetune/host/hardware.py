"""What the machine at hand has, without torch."""

from __future__ import annotations

import os
import re
import subprocess

NAME = re.compile(r"^GPU \d+: (.*?)(?: \(UUID: .*)?$", re.MULTILINE)


def gpus_here() -> int:
    return len(gpu_names())


def gpu_names() -> list[str]:
    """By nvidia-smi, which is there wherever an NVIDIA driver is; none without it."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return NAME.findall(done.stdout)


def cores_here() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
