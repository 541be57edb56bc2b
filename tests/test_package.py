"""What is installed is whole."""

from __future__ import annotations

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
