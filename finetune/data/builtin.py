"""Real English that ships with every CPython: docstrings of the standard library, labeled with their package, and the
reference manual.

Predicting the package from the docstring is a real task: TF-IDF with logistic regression gets an accuracy of about
0.75, and the largest class has a fifth of the rows.
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
HELD_OUT_OF = 10  # one package in ten, by a hash of its name
SKIPPED = ("test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data")
MIN_CHARACTERS = 40
MOST_SHARED = 0.1  # largest share of a topic's lines that also occur in longer topics
MIN_ROWS_PER_LABEL = 20  # a package with fewer docstrings is too small to split


def docstring_rows() -> dict[str, list[str]]:
    """Columns `text` and `label`: one row per docstring of 40 characters or more, in a fixed order.

    Sources are parsed, never imported, so the rows depend only on the Python version. Packages that this Python lacks
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
    """The syntax tree of each file of a package except its tests, ordered by path."""
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests", "idle_test"}.isdisjoint(path.relative_to(folder).parts) and (tree := parsed_file(path)):
            yield tree


def parsed_file(path: Path) -> ast.Module | None:
    """None for a file that this Python cannot parse, such as lib2to3's grammar samples."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return None


def by_package(made: Callable[[ast.Module], Iterable[tuple[str, T]]]) -> dict[str, dict[str, T]]:
    """Applies `made` to the whole library's source. It yields a text and its data; the result maps one to the other in
    the splits `train` and `validation`, which share no package and no text."""
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

    Many topics are parts of longer ones ("if" of "compound"). Those are left out, because held-out text must not occur
    in the training text.
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
