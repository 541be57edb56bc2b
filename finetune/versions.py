"""Which releases are installed here: of Python, the toolkit, its checkout and the packages that a run hangs on."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# On which all tests were run, and in which tests/upstream/ read the private names that are leaned on.
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
    """None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def revision() -> str:
    """Of the toolkit's checkout, with -dirty where files differ from it; "unknown" outside of one."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """Of all that are installed, for records of what was made with them."""
    found = {name: text for name in PACKAGES if (text := version(name))}
    return {"python": platform.python_version(), **found}
