"""A folder of data in the hub's layout before `datasets` opens it: its links and the patterns of its README.md, which
say what to read, do not lead out of it (datasets 5.2 follows both, wherever they lead)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.errors import RequestError
from finetune.safe_read.files import open_plain, read_bounded, refuse_outside
from finetune.safe_read.values import parse_yaml

DESCRIPTIONS = ("README.md", ".huggingface.yaml")  # datasets/config.py: REPOCARD_FILENAME, REPOYAML_FILENAME
FRONT = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---", re.DOTALL)
TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet", ".arrow", ".md", ".yaml")


def check_data_folder(folder: Path, said: str) -> None:
    """Raises RequestError, which begins with `said` or a path."""
    for base, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(base, name)
            if path.is_symlink():
                refuse_outside(path, folder)
            if name in names and name.endswith(TABLES):
                open_plain(path, folder).close()
    for name in DESCRIPTIONS:
        if os.path.lexists(path := folder / name):
            text = read_bounded(path, inside=folder)
            front = FRONT.match(text) if name.endswith(".md") else None
            content = parse_yaml(front[1] if front else "" if name.endswith(".md") else text, str(path))
            for place in _texts(content.get("configs") if isinstance(content, dict) else None):
                if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts or "://" in place:
                    raise RequestError(f"{said}: {name} names {place[:80]!r}, which leads out of the folder.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield value
