"""A recipe's YAML: one flag and its value in a line. Light, for `finetune check` reads it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from finetune.errors import RequestError

MAX_YAML_BYTES = 1_000_000


class _OneOfEach(yaml.SafeLoader):
    """A key that is there twice is a mistake; YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_flat_yaml(name: str, said: str | None = None, holds: str = "flat `flag: value` lines") -> dict[str, Any]:
    """The file's lines. Raises RequestError, with line and column, for what is no such file; `said` is how it was asked
    for, other than by --config, and `holds` what belongs into it."""
    path, said = Path(name).expanduser(), said or f"--config {name}"
    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise RequestError(f"{said}: {path.stat().st_size:,} bytes is no recipe config.")
        content = yaml.load(path.read_text(encoding="utf-8"), _OneOfEach)
    except OSError as error:
        raise RequestError(f"{said}: cannot be read ({error.strerror}). Give the path of a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise RequestError(
            f"{name}{where}: cannot be read as YAML: {getattr(error, 'problem', None) or error}."
        ) from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise RequestError(f"{name}: must hold {holds}, but {found}.")
    return content
