"""Reading JSON and YAML from anybody: of bounded size and depth, and with an error of ours for whatever is wrong."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import RequestError, first_line

MOST_BYTES = 64 * 2**20
MOST_YAML_BYTES = 2 * 2**20  # PyYAML takes a second for each
DEEPEST = 50  # levels of objects and lists in each other; what recipes and benches write has 6
MOST_DIGITS = 400  # of an integer: more than the largest float has
TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other takes seconds for a file of brackets
# What PyYAML's constructors raise for a tag over another value, as `!!int ""`, beside its own errors.
YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises RequestError, with the path, for whatever is none."""
    found = parse_json(read_bounded(path), str(path))
    if not isinstance(found, dict):
        raise RequestError(f"{path}: is no JSON object.")
    return found


def read_bounded(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a plain file of at most `most` bytes; links are followed. Raises RequestError."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its writer
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RequestError(f"{path}: is no plain file.")
            content = file.read(most + 1)
        if len(content) > most:
            raise RequestError(f"{path}: has more than {most / 2**20:,.0f} MiB, and nothing that is read here has.")
        return content.decode("utf-8")
    except FileNotFoundError as error:
        raise RequestError(f"{path}: there is no such file.") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: is no text in UTF-8 ({first_line(error)}).") from error


def parse_json(text: str, place: str) -> Any:
    """JSON whose depth is looked at before it is parsed. Raises RequestError that begins with `place`."""
    if is_deeper(text, DEEPEST):
        raise RequestError(f"{place}: is nested deeper than {DEEPEST} levels.")
    try:
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: is no JSON ({first_line(error)}).") from error


def is_deeper(text: str, levels: int) -> bool:
    """Whether JSON has more levels of objects and lists in each other, without parsing it."""
    level = 0
    for match in TOKEN.finditer(text):
        level += (match[0] in "[{") - (match[0] in "]}")
        if level > levels:
            return True
    return False


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


def read_yaml(path: Path, loader: Any = SAFE_LOADER) -> Any:
    """YAML of plain values, without tags of objects and without aliases: ten of ten aliases each are 10**10 values.
    `loader` must be a kind of yaml.SafeLoader. Raises RequestError."""
    text = read_bounded(path, MOST_YAML_BYTES)
    level = 0
    try:
        for event in yaml.parse(text, Loader=SAFE_LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise RequestError(f"{path}: has a YAML alias (*{event.anchor}), which is not taken. Write it out.")
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > DEEPEST:
                raise RequestError(f"{path}: is nested deeper than {DEEPEST} levels.")
        return yaml.load(text, Loader=loader)
    except YAML_ERRORS as error:
        raise RequestError(f"{path}: is no YAML of plain values ({' '.join(str(error).split())[:200]}).") from error
