"""Installed versions: Python, the toolkit, its checkout, and the packages that a run depends on."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The versions that all tests ran on, and whose private names tests/upstream/ checks.
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "datasets": "5.2.0",
    "evaluate": "0.4.6",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "trl": "1.16.0",
}
PACKAGES = (
    *("finetune", "torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "safetensors", "numpy"),
    *("scikit-learn", "peft", "bitsandbytes", "trl"),
)


def version(name: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def revision() -> str:
    """The commit of the toolkit's checkout, with -dirty if files were changed; "unknown" outside a checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """The versions of all installed packages of PACKAGES, and of Python, for the records of runs."""
    found = {name: text for name in PACKAGES if (text := version(name))}
    return {"python": platform.python_version(), **found}
