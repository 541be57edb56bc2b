"""The prompts of a file, in its order. Never imports torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.chat.turns import ASSISTANT, Turn, tools_of, turns_of
from finetune.errors import RequestError
from finetune.safe_read import parse_json, read_bounded

MOST_BYTES = 2**30
SEPARATORS = {".csv": ",", ".tsv": "\t"}
LINES, KINDS = (".txt", ".text", ".md"), (".jsonl", ".json", *SEPARATORS, ".txt")
TURNS, PROMPT, TOOLS = "messages", "prompt", "tools"


@dataclass(frozen=True)
class Prompt:
    """`content` is a text, or the turns of a conversation to continue; `place` names its line."""

    place: str
    content: str | list[Turn]
    tools: list[dict[str, Any]] | None = None
    id: Any = None


def read_prompts(name: str, column: str | None, reasoning: str = "keep") -> list[Prompt]:
    """The prompts in the file `name`. Raises RequestError, naming the line, for a row that is not a prompt."""
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    if suffix not in (*KINDS, *LINES):
        raise RequestError(f"--prompts {name}: cannot tell what it is by its name. Give {', '.join(KINDS)}.")
    if column and suffix in LINES:
        raise RequestError(f"--prompt_column {column}: {path.name} has lines of text, and no columns. Drop it.")
    text = read_bounded(path, MOST_BYTES, name=f"--prompts {name}")
    found = [_prompt(place, row, column, reasoning) for place, row in _rows(path.name, text, suffix)]
    if not found:
        raise RequestError(f"--prompts {name}: the file has no prompts.")
    return found


def _rows(name: str, text: str, suffix: str) -> Iterator[tuple[str, Any]]:
    """Each row with its place."""
    if suffix == ".json":
        rows = parse_json(text, name)
        if not isinstance(rows, list):
            raise RequestError(f"{name}: must be a list of prompts. For one JSON object per line, name it .jsonl.")
        yield from ((f"{name}, row {number}", row) for number, row in enumerate(rows, 1))
    elif suffix in SEPARATORS:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=SEPARATORS[suffix], strict=True)
        try:
            for row in reader:
                place = f"{name}:{reader.reader.line_num}"
                if None in row or None in row.values():
                    raise RequestError(f"{place}: has more or fewer cells than the header has. Fix the line.")
                yield place, row
        except csv.Error as error:
            raise RequestError(
                f"{name}:{reader.reader.line_num}: is not csv: {error}. Is a quote left open?"
            ) from error
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                place = f"{name}:{number}"
                yield place, line.rstrip("\r") if suffix in LINES else parse_json(line, place)


def _prompt(place: str, row: Any, column: str | None, reasoning: str) -> Prompt:
    if isinstance(row, str):
        return Prompt(place, row)
    if not isinstance(row, dict):
        raise RequestError(f"{place}: must be an object with `{PROMPT}` or `{TURNS}`, or a text.")
    column = column or (TURNS if row.get(TURNS) else PROMPT)
    found = row.get(column)
    if found is None:
        there = ", ".join(map(str, row)) or "nothing"
        meant = f"`{column}`" if column != PROMPT else f"`{PROMPT}` and no `{TURNS}`"
        raise RequestError(f"{place}: has no {meant}; it has {there}. Name the column with --prompt_column.")
    if isinstance(found, str) and column != TURNS:
        return Prompt(place, found, id=row.get("id"))
    if column != TURNS and not isinstance(found, list):
        raise RequestError(f"{place}: `{column}` must be a text, or a list of turns.")
    try:
        turns, tools = turns_of(found, reasoning), tools_of(row.get(TOOLS))
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    if turns[-1]["role"] in (ASSISTANT, "system", "developer"):
        raise RequestError(
            f"{place}: ends in a turn of role `{turns[-1]['role']}`, which leaves nothing to answer. End it with a "
            "user's turn, or a tool's."
        )
    return Prompt(place, turns, tools, row.get("id"))
