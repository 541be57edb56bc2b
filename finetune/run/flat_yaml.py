"""A recipe's YAML: one flag and its value in a line. Light, for `finetune check` reads it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from finetune.errors import RequestError
from finetune.safe_read import SAFE_LOADER, YAML_ERRORS, read_bounded

MAX_YAML_BYTES = 1_000_000
FLAGS = "flat `flag: value` lines"
DEEPEST = 12  # levels of lists and objects in each other; a grid has 4


class _OneOfEach(yaml.SafeLoader):
    """A key that is there twice is a mistake; YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_flat_yaml_lines(name: str) -> tuple[dict[Any, Any], dict[Any, int]]:
    """The file of --config as `read_flat_yaml` reads it, and the number of each key's line, from 1."""
    content = read_flat_yaml(name)
    node: Any = yaml.compose(read_bounded(Path(name).expanduser()), Loader=SAFE_LOADER)
    return content, {name: key.start_mark.line + 1 for name, (key, _) in zip(content, node.value, strict=True)}


def read_flat_yaml(name: str, said: str | None = None, holds: str = FLAGS) -> dict[str, Any]:
    """The file's lines. Raises RequestError, with line and column, for what is no such file; `said` is how it was asked
    for, other than by --config, and `holds` what belongs into it."""
    path, said = Path(name).expanduser(), said or f"--config is {name!r} (command line)"
    if path.is_dir():
        raise RequestError(f"{said}, but that is a folder. Give a YAML in it.")
    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise RequestError(f"{said}: {path.stat().st_size:,} bytes is no recipe config.")
        text = read_bounded(path)
        _refuse_expansion(text, name)
        content = yaml.load(text, _OneOfEach)
    except OSError as error:
        raise RequestError(f"{said}: cannot be read ({error.strerror}). Give the path of a YAML file.") from error
    except YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise RequestError(
            f"{name}{where}: cannot be read as YAML: {getattr(error, 'problem', None) or error}."
        ) from error
    if holds == FLAGS and isinstance(content, dict) and isinstance(content.get("grid"), list):
        raise RequestError(f"{name}: is a grid, which `finetune bench {name}` runs, and no recipe's YAML.")
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise RequestError(f"{name}: must hold {holds}, but {found}.")
    return content


def _refuse_expansion(text: str, name: str) -> None:
    """Ten aliases of ten aliases each are 10**10 values, and a thousand brackets are the parser's end."""
    level = 0
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        place = f"{name}:{event.start_mark.line + 1}:{event.start_mark.column + 1}" if event.start_mark else name
        what = "an alias" if isinstance(event, yaml.AliasEvent) else None
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<":
            what = "a merge key"
        if what:
            raise RequestError(f"{place}: cannot be read as YAML: it has {what}, which is not taken. Write it out.")
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > DEEPEST:
            raise RequestError(f"{place}: cannot be read as YAML: it is nested deeper than {DEEPEST} levels.")
