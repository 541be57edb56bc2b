"""Checks the files and folders that flags name before anything is imported, and reports all missing ones at once."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.errors import RequestError, first_line, listed
from finetune.run.flag import FILE, FOLDER, METRIC, NAME_OR_PATH, TEMPLATE
from finetune.run.meanings import nearest
from finetune.run.mixture import path_of
from finetune.safe_read import read_bytes

TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet")
METRICS = tuple(sorted(path.stem for path in Path(__file__).parents[1].glob("metrics/[!_]*.py")))
TEMPLATES = tuple(sorted(path.stem for path in Path(__file__).parents[1].glob("data/chat/templates/*.jinja")))
SHOWN = 8


def missing_inputs(run: Any) -> Iterator[str]:
    """The missing inputs of the run, each with what is there instead."""
    for flag in run.recipe.flags.values():
        if flag.path in KINDS:
            found = ((one, KINDS[flag.path](one)) for one in named_in(run.value(flag.name)))
            faults = ((flag.path == FILE and _as_list(one, flag.many)) or fault for one, fault in found if fault)
            yield from (f"{run.said(flag.name)}, but {fault}" for fault in islice(faults, SHOWN))


def _as_list(name: str, many: bool) -> str | None:
    """What is wrong with several files or a weight in one word; None if there are no such files."""
    files, (path, _, weight) = name.split(","), name.rpartition(":")
    if len(files) > 1 and all(Path(path_of(one)).expanduser().exists() for one in files):
        return f"it is several files. {'Separate them by spaces' if many else 'This recipe takes one'}."
    if many and path and Path(path).expanduser().exists():
        return f"{weight!r} after the colon is not a weight. Give a number, as in {path}:0.7, or drop it."
    return None


def named_in(value: Any) -> list[str]:
    """The paths that a flag's value names: one, several (maybe with weights), or none."""
    return [path_of(one) if isinstance(value, list) else one for one in _words(value)]


def _words(value: Any) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str) and one]


def missing_file(name: str) -> str | None:
    """Why `name` cannot be a file, and what is there instead; None if it is one."""
    path = Path(name).expanduser()
    if path.is_dir():
        return "it is a folder. Give one file, or the folder as --dataset_name."
    return None if path.exists() else f"there is no such file.{_there(path)} Check the path."


def _folder(name: str) -> str | None:
    path = Path(name).expanduser()
    if path.is_dir():
        return None
    found = "it is a file. Give a folder." if path.exists() else f"there is no such folder.{_there(path)}"
    return f"{found} Check the path."


def missing_path(name: str) -> str | None:
    """A hub id has at most one slash; a name with more, or one that begins like a path, is a path."""
    is_path = name.startswith(("/", "./", "../", "~")) or name.rstrip("/").count("/") > 1
    path = Path(name).expanduser()
    return (
        f"there is no such folder or file.{_there(path)} Check the path."
        if is_path and not os.path.exists(path)  # False also for a name that is too long for a path
        else None
    )


def _metric(name: str) -> str | None:
    if name in METRICS:
        return None
    if name.endswith(".py") and Path(name).expanduser().is_file():
        return _is_no_python(Path(name).expanduser())
    near = nearest(name, METRICS)
    return f"{name} is neither a shipped metric ({', '.join(METRICS)}) nor a Python file with an evaluate.Metric." + (
        f" Did you mean {near}?" if near else " Give one."
    )


def _is_no_python(path: Path) -> str | None:
    """Checks only the syntax: the file first runs where its metrics are tried."""
    try:
        ast.parse(read_bytes(path), path.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"it is not valid Python{line}: {first_line(error)}. Fix the file."
    except RequestError as error:
        return str(error)
    return None


def _template(name: str) -> str | None:
    if name in TEMPLATES or Path(name).expanduser().is_file():
        return None
    near = nearest(name, TEMPLATES)
    return f"{name} is neither a jinja file nor one of the shipped templates, {', '.join(TEMPLATES)}." + (
        f" Did you mean {near}?" if near else " Give one."
    )


KINDS = {FILE: missing_file, FOLDER: _folder, NAME_OR_PATH: missing_path, METRIC: _metric, TEMPLATE: _template}


def _there(missing: Path) -> str:
    """What a message says about the folder in which a path does not exist."""
    folder = missing.parent
    if not os.path.isdir(folder):
        return f" There is no folder {folder} either." + _like(folder)
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if not path.name.startswith("."))
    near = [name for name in names if name.endswith((*TABLES, "/", ".yaml"))]
    there = listed(near, SHOWN) if near else "no table or folder"
    return f"{_like(missing)} {str(folder).rstrip('/')}/ holds {there}."


def _like(missing: Path) -> str:
    """The path with the most similar name in the same folder, as a question; "" if none is similar."""
    names = os.listdir(missing.parent) if os.path.isdir(missing.parent) else ()
    near = difflib.get_close_matches(missing.name, sorted(names))
    alike = (name for name in near if difflib.get_close_matches(missing.stem, [Path(name).stem]))  # not by .csv alone
    found = next(alike, None)
    return f" Did you mean {missing.parent / found}?" if found else ""
