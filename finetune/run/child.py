"""Child processes."""

from __future__ import annotations

import os
import sys


def environment_of_child() -> dict[str, str]:
    """An environment in which Python imports what this process can, and nothing from the current folder: `-m` and `-c`
    would look there first, and a stranger's torch.py may be there. Python 3.10 ignores PYTHONSAFEPATH and does look."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
