"""Which releases are installed here: of Python, the toolkit and the packages that a run hangs on."""

from __future__ import annotations

import platform
from importlib import metadata

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


def versions() -> dict[str, str]:
    """Of all that are installed, for records of what was made with them."""
    found = {name: text for name in PACKAGES if (text := version(name))}
    return {"python": platform.python_version(), **found}
