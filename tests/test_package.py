"""What is installed is whole."""

from __future__ import annotations

import ast
from fnmatch import fnmatch

from conftest import REPO

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
