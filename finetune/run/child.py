"""Processes that this one starts for itself."""

from __future__ import annotations

import os
import sys


def environment_of_child() -> dict[str, str]:
    """In which Python imports what this process can, and nothing of the folder that it was started in: `-m` and `-c`
    would look there first, and a stranger's torch.py may lie in it. Python 3.10 knows no PYTHONSAFEPATH, and does."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
