"""Real English that every CPython carries: docstrings of the standard library, labelled with their package, and the
reference manual.

Telling the package from the docstring is a real task: TF-IDF with logistic regression gets about 0.75 of it right, and
the largest class is a fifth of the rows.
"""

from __future__ import annotations

import ast
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

PACKAGES = (
    "asyncio",
    "concurrent",
    "ctypes",
    "distutils",
    "email",
    "http",
    "idlelib",
    "importlib",
    "json",
    "lib2to3",
    "logging",
    "multiprocessing",
    "tkinter",
    "unittest",
    "urllib",
    "wsgiref",
    "xml",
)
T = TypeVar("T")
HELD_OUT_OF = 10  # one package of so many, by a hash of its name
SKIPPED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data")
MIN_CHARACTERS = 40
MOST_SHARED = 0.1  # of a topic's longer lines, that stand in longer topics as well
MIN_ROWS_PER_LABEL = 20  # a package with fewer docstrings than this cannot be split into train and evaluation


def docstring_rows() -> dict[str, list[str]]:
    """Columns `text` and `label`: one row for each docstring of 40 characters or more, in a fixed order.

    Sources are parsed, never imported, so the rows depend on the Python version alone. Packages that this Python lacks
    (distutils from 3.12, tkinter on a server) are skipped.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    rows: dict[str, list[str]] = {"text": [], "label": []}
    for package in PACKAGES:
        texts = sorted(set(_docstrings(library / package)))
        if len(texts) >= MIN_ROWS_PER_LABEL:
            rows["text"] += texts
            rows["label"] += [package] * len(texts)
    return rows


def parsed(folder: Path) -> Iterator[ast.Module]:
    """The source of each file of a package, but for its tests, in the order of their paths."""
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests", "idle_test"}.isdisjoint(path.relative_to(folder).parts) and (tree := parsed_file(path)):
            yield tree


def parsed_file(path: Path) -> ast.Module | None:
    """None for what is not Python of this version: lib2to3 carries files of other grammars."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return None


def by_package(made: Callable[[ast.Module], Iterable[tuple[str, T]]]) -> dict[str, dict[str, T]]:
    """What is `made` of the whole library's source, a text and what belongs to it, for the splits `train` and
    `validation`, which share no package and no text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, dict[str, T]] = {"train": {}, "validation": {}}
    for path in sorted(library.rglob("*.py")):
        package, *inner = path.relative_to(library).parts
        if {package, *inner}.isdisjoint(SKIPPED) and (tree := parsed_file(path)):
            held_out = zlib.crc32(package.removesuffix(".py").encode()) % HELD_OUT_OF == 0
            for text, rest in made(tree):
                splits["validation" if held_out else "train"].setdefault(text, rest)
    splits["train"] = {text: rest for text, rest in splits["train"].items() if text not in splits["validation"]}
    return splits


def _docstrings(folder: Path) -> Iterator[str]:
    for tree in parsed(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= MIN_CHARACTERS:
                    yield text


def manual_topics() -> list[str]:
    """The topics of Python's reference manual as plain text, about 370 kB, in alphabetical order.

    Many topics are parts of longer ones ("if" of "compound"). Those are left out, for what is held out to validate must
    not be in the training text as well.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        lines = {line.strip() for line in topics[name].splitlines() if len(line.strip()) >= MIN_CHARACTERS}
        if len(lines & seen) <= MOST_SHARED * len(lines):
            kept.append(name)
            seen |= lines
    return [topics[name].strip() + "\n" for name in sorted(kept)]
