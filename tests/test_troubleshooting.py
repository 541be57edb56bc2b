"""docs/troubleshooting.md quotes messages as they stand: ours in finetune/, others in the file that it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import REPO

OURS, _, THEIRS = (REPO / "docs" / "troubleshooting.md").read_text().partition("## Messages of other packages")
QUOTED = re.findall(r"^\| `([^`]+)` \|", OURS, re.MULTILINE)
OF_FILES = re.findall(r"^\| `([^`]+)` \| `([\w./]+\.py)` \|", THEIRS, re.MULTILINE)


@cache
def texts() -> tuple[str, ...]:
    """Every string of finetune/, with a mark where an f-string has a value."""
    found: list[str] = []
    for path in (REPO / "finetune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def test_the_page_has_messages_of_both_kinds() -> None:
    assert len(QUOTED) > 30
    assert len(OF_FILES) > 9
    assert len(texts()) > 5000


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_of_ours_stands_in_the_source(message: str) -> None:
    pattern = re.compile(r".*".join(map(re.escape, message.split("..."))), re.DOTALL)
    assert any(pattern.search(text) for text in texts())


@pytest.mark.parametrize(("message", "file"), OF_FILES)
def test_a_message_of_another_package_stands_in_its_file(message: str, file: str) -> None:
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    assert spec is not None
    assert message in (Path(str(spec.origin)).parent / rest).read_text()


def test_every_code_of_a_rule_that_is_named_is_one() -> None:
    named = set(re.findall(r"\bDS\d{3}\b", OURS + THEIRS))
    known = set(re.findall(r"\bDS\d{3}\b", (REPO / "docs" / "check.md").read_text()))
    assert len(named) > 4
    assert named <= known
