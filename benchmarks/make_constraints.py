"""Writes constraints.txt: the installed release of every package that `finetune[dev]` requires.

python benchmarks/make_constraints.py        # in the environment in which the gate passed
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).resolve().parents[1] / "constraints.txt"
HEAD = """\
# The releases that finetune's tests last passed with (Python 3.11, Linux, CPU), beside the ranges of pyproject.toml:
#     pip install -c constraints.txt ".[peft]"
# Written by benchmarks/make_constraints.py. Some of them have no build for Python 3.10, where none applies.
"""
MARKER = 'python_version >= "3.11"'


def installed(name: str = "finetune", extra: str = "dev") -> dict[str, str]:
    """The installed release of each requirement, recursively, by name; packages that are not installed are left out."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra)]
    while waiting:
        name, extra = one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[canonicalize_name(name)] = re.sub(r"\+.*", "", package.version)  # 2.13.0+cpu is 2.13.0 to pip
        for wanted in map(Requirement, package.requires or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(wanted.name, more) for more in ("", *wanted.extras)]
    return {name: version for name, version in sorted(found.items()) if name != "finetune"}


def read() -> dict[str, str]:
    """The releases in the file, by name."""
    lines = (line.partition(";")[0].strip() for line in FILE.read_text().splitlines() if not line.startswith("#"))
    pairs = (line.partition("==") for line in lines if line)
    return {name: version for name, _, version in pairs}


if __name__ == "__main__":
    FILE.write_text(HEAD + "".join(f"{name}=={version} ; {MARKER}\n" for name, version in installed().items()))
