"""The tools on this machine with which DeepSpeed compiles its ops."""

from __future__ import annotations

import shutil
from ctypes.util import find_library


def compiler() -> str | None:
    """The path of the C++ compiler."""
    return shutil.which("g++") or shutil.which("c++")


def has_libaio() -> bool:
    """Whether the library that NVMe offload needs is installed."""
    return find_library("aio") is not None
