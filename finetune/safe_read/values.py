"""Untrusted JSON and YAML: of bounded size and depth, and with RequestError for whatever is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from finetune.errors import RequestError, first_line
from finetune.safe_read.files import MOST_BYTES, read_bounded

MOST_YAML_BYTES = 2**18  # PyYAML takes a second per MiB, and integer keys can be crafted so that their hashes collide
MOST_VALUES = 4_000_000  # of JSON: the largest tokenizers have a million; each takes up to a hundred bytes
MOST_LINES = 1_000_000
DEEPEST = 50  # levels of nested objects and lists; what recipes and benchmarks write has 6
MOST_DIGITS = 400  # of an integer: more than the largest float has
MOST_BITS = 1_400  # the same, for YAML's hexadecimal integers
# Strings, the last of which may be unterminated, and brackets.
TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the Python one takes seconds for a file of brackets
# What PyYAML's constructors raise, besides its own errors, for a tag that does not fit its value, such as `!!int ""`.
YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


def read_json_object(
    path: Path, most: int = MOST_BYTES, inside: Path | None = None, strict: bool = False, name: str | None = None
) -> dict[str, Any]:
    """Read a JSON object. Raises RequestError, with `name` or the path, for anything else."""
    said = name or str(path)
    found = parse_json(read_bounded(path, most, inside, said), said, strict)
    if not isinstance(found, dict):
        raise RequestError(f"{said}: is not a JSON object.")
    return found


def read_json_lines(path: Path, inside: Path | None = None) -> tuple[list[tuple[int, Any]], int]:
    """The values of a JSON Lines file with their line numbers, from 1; and the number of lines that do not parse, as
    the last one of a killed run may not. Raises RequestError for a file that cannot be read."""
    lines = read_bounded(path, inside=inside).split("\n")
    if len(lines) > MOST_LINES:
        raise RequestError(f"{path}: has {len(lines):,} lines; at most {MOST_LINES:,} are read.")
    found, torn = [], 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append((number, parse_json(line, f"{path}:{number}")))
            except RequestError:
                torn += 1
    return found, torn


def parse_json(text: str, place: str, strict: bool = False) -> Any:
    """Raises RequestError that begins with `place`. `strict` also refuses NaN and duplicate keys."""
    _refuse_bomb(text, place)
    try:
        if strict:
            return json.loads(text, parse_int=_integer, parse_constant=_refused, object_pairs_hook=_once)
        return json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: is not valid JSON ({first_line(error)}).") from error


def _refuse_bomb(text: str, place: str) -> None:
    level = 0
    if text.count(",") > MOST_VALUES:
        raise RequestError(f"{place}: has more than {MOST_VALUES:,} values.")
    for number, match in enumerate(TOKEN.finditer(text)):
        level += (match[0] in "[{") - (match[0] in "]}")
        if level > DEEPEST:
            raise RequestError(f"{place}: is nested deeper than {DEEPEST} levels.")
        if number > MOST_VALUES:
            raise RequestError(f"{place}: has more than {MOST_VALUES:,} values.")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is given twice among {', '.join(key for key, _ in pairs)}"[:200])
    return found


def read_yaml(path: Path, name: str | None = None, loader: Any = SAFE_LOADER, inside: Path | None = None) -> Any:
    """Read YAML of plain values, without object tags and without aliases: ten levels of ten aliases are 10**10 values.
    `loader` must be a kind of yaml.SafeLoader. Raises RequestError that begins with `name`, line and column."""
    return parse_yaml(read_bounded(path, MOST_YAML_BYTES, inside), name or str(path), loader)


def parse_yaml(text: str, place: str, loader: Any = SAFE_LOADER) -> Any:
    level = 0
    if len(text) > MOST_YAML_BYTES:
        raise RequestError(f"{place}: has {len(text):,} characters of YAML; at most {MOST_YAML_BYTES:,} are read.")
    try:
        for event in yaml.parse(text, Loader=SAFE_LOADER):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if what := _not_taken(event, level):
                at: Any = event.start_mark
                raise RequestError(f"{place}:{at.line + 1}:{at.column + 1}: cannot be read as YAML: it {what}.")
        found = yaml.load(text, Loader=loader)
        _refuse_huge(found)
        return found
    except YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())[:200]
        is_form = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
        mend = " Check this line's indentation, and quote values that contain ': '." if is_form else ""
        raise RequestError(f"{place}{where}: cannot be read as YAML: {reason}.{mend}") from error


def _not_taken(event: Any, level: int) -> str | None:
    if isinstance(event, yaml.AliasEvent):
        return "has an alias, which is not supported; write it out"
    if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<":
        return "has a merge key, which is not supported; write it out"
    return f"is nested deeper than {DEEPEST} levels" if level > DEEPEST else None


def leaves(value: Any) -> Iterator[Any]:
    """All values in nested objects and lists that are not themselves objects or lists."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def _refuse_huge(found: Any) -> None:
    """Raises ValueError for integers larger than any float; Python refuses to print them above some length."""
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int) and one.bit_length() > MOST_BITS:
            raise ValueError("an integer larger than any float")
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one
