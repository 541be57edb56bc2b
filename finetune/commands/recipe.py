"""`finetune recipe`: list, show or copy the recipes, configs and launch files that come with the toolkit."""

from __future__ import annotations

import argparse
import ast
import shutil
from pathlib import Path

from finetune.errors import RequestError, or_meant
from finetune.shipped import KINDS, RECIPES, as_typed, files


def run(asked: argparse.Namespace) -> int:
    """Print or copy; returns the exit status."""
    if asked.kind == "list":
        for kind, pattern in zip(("recipes", "configs, for --config NAME", "launch files"), KINDS, strict=True):
            print(f"{kind}:")
            for name, path in files(pattern).items():
                print(f"  {name:<27} {_first_line(path)}".rstrip())
        return 0
    path = find(asked.name)
    if asked.kind == "show":
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    to = Path(asked.to or path.name)
    to = to / path.name if to.is_dir() else to
    if to.exists():
        raise RequestError(f"{to}: the file exists already. Name another: `finetune recipe copy {asked.name} TO`.")
    if not to.parent.is_dir():
        raise RequestError(f"{to}: there is no folder {to.parent}. Make it, or name another.")
    shutil.copyfile(path, to)
    print(f"{as_typed(path)} -> {to}")
    return 0


def find(name: str) -> Path:
    """A recipe, config or launch file of the toolkit, by name. Raises RequestError naming the closest match."""
    known = files()
    if name in known:
        return known[name]
    by_place = {str(path.relative_to(RECIPES)): path for path in known.values()}
    if (place := name.removeprefix("recipes/")) in by_place:
        return by_place[place]
    hint = or_meant(place, [*known, *by_place], " `finetune recipe list` lists them.")
    raise RequestError(f"{name}: there is no such recipe.{hint}")


def _first_line(path: Path) -> str:
    """A file's description: the first line of its docstring, or its first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comments = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and not line.startswith("#!"))
    return next(comments, "")
