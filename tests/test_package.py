"""What is installed is whole."""

from __future__ import annotations

import ast
import sys
from fnmatch import fnmatch
from importlib.metadata import version

import pytest
from conftest import REPO
from make_constraints import installed, read
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib


def test_every_file_beside_the_code_is_in_the_package() -> None:
    told = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["finetune"]
    root = REPO / "finetune"
    beside = [str(path.relative_to(root)) for path in root.rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert len(beside) > 10
    assert [name for name in beside if not any(fnmatch(name, pattern) for pattern in told)] == []
    assert [pattern for pattern in told if not any(fnmatch(name, pattern) for name in beside)] == []


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or not version("torch").endswith("+cpu"),
    reason="constraints.txt lists what Python 3.11 and torch's build for CPUs need",
)
def test_the_constraints_are_what_is_installed() -> None:
    pinned, found = read(), installed()
    assert len(found) > 100
    wrong = {name: (version, pinned.get(name)) for name, version in found.items() if pinned.get(name) != version}
    assert not wrong, "after the gate has passed: python benchmarks/make_constraints.py"


def test_the_constraints_are_within_the_ranges() -> None:
    told, pinned = tomllib.loads((REPO / "pyproject.toml").read_text())["project"], read()
    wanted = [Requirement(line) for lines in (told["dependencies"], *told["optional-dependencies"].values())
              for line in lines]  # fmt: skip
    assert len(wanted) > 30
    pins = {one.name: pinned.get(canonicalize_name(one.name)) for one in wanted if one.name != "finetune"}
    assert [name for name, version in pins.items() if version is None] == []
    outside = [str(one) for one in wanted if one.name != "finetune" and not one.specifier.contains(pins[one.name])]
    assert outside == []


def test_every_place_names_the_same_pythons() -> None:
    newest = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["requires-python"].rpartition("<3.")[2]
    minor = int(newest) - 1
    for name, words in {
        "README.md": f"Python 3.10 to 3.{minor} on Linux",
        "install.sh": f"< (3, {minor + 1}))",
        "finetune/doctor/probes.py": f"<= (3, {minor})",
        "docs/install.md": f"Python 3.10 to 3.{minor}",
    }.items():
        assert words in (REPO / name).read_text(), name


MOST_LINES, MOST_LINES_OF_A_FUNCTION = 300, 50


def test_modules_and_functions_stay_short() -> None:
    """ruff's C901 holds how branched they are."""
    modules = sorted((REPO / "finetune").rglob("*.py"))
    assert len(modules) > 200
    long_modules, long_functions = set(), set()
    for path in modules:
        name, text = str(path.relative_to(REPO / "finetune")), path.read_text()
        if len(text.splitlines()) > MOST_LINES:
            long_modules.add(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_FUNCTION:
                long_functions.add(f"{name}: {node.name}")
    assert long_modules == set()
    assert long_functions == set()
