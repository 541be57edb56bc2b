"""Read a DeepSpeed config as strict JSON, the form that DeepSpeed (hjson) and accelerate (json.load) both accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.errors import RequestError

MAX_BYTES = 1_000_000  # a DeepSpeed config is a few kilobytes; anything near this is some other file


def read_config(path: Path) -> dict[str, Any]:
    """The config in `path`. Raises RequestError, with line and column, for anything that is not one JSON object."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RequestError(f"{path}: {path.stat().st_size:,} bytes is no DeepSpeed config. Is it the right file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: is not UTF-8 text (byte {error.start}). Save it as UTF-8 JSON.") from error
    try:
        config = json.loads(text, object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestError(f"{path}:{error.lineno}:{error.colno}: {error.msg}.{_hint(text, error)}") from error
    except RecursionError as error:
        raise RequestError(f"{path}: is nested too deeply to be a DeepSpeed config.") from error
    except ValueError as error:
        raise RequestError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path}:1:1: holds a JSON {type(config).__name__}, but a DeepSpeed config is an object.")
    return config


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f'the key "{key}" is given twice in one object. Keep one of them.')
        seen[key] = value
    return seen


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number. Write a finite one.")


def _hint(text: str, error: json.JSONDecodeError) -> str:
    """What the usual slips look like to a JSON parser, and how to mend them."""
    here = text[error.pos :].lstrip()
    before = text[: error.pos].rstrip()
    if here[:1] == "#" or here[:2] in ("//", "/*"):
        return " JSON has no comments: DeepSpeed alone would take one, accelerate does not. Delete it."
    if before.endswith(",") or "trailing comma" in error.msg:
        return " A trailing comma: DeepSpeed alone would take it, accelerate does not. Delete the comma."
    if here[:1] == "'":
        return ' JSON strings take double quotes: ".'
    if not here:
        return " The file ends too early: a closing bracket is missing." if text.strip() else " The file is empty."
    return ""
