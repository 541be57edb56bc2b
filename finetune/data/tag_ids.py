"""Tags that are whole numbers, named by --tag_names in the order of their ids. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from finetune.data.columns import HIDDEN_LABEL, names_of_ids
from finetune.errors import RequestError, plain
from finetune.run.flag import NUMBER

WHOLE = re.compile(r"-?\d+")
SHOWN = 5


def check_tag_names(names: Sequence[str]) -> None:
    """Raises RequestError for --tag_names that do not give each id a name of its own."""
    said = f"--tag_names {' '.join(names)}"
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{said}: has {twice} twice. Give each id a name of its own, in the order of the ids.")
    if wrong := next((name for name in names if not name.strip() or NUMBER.fullmatch(name)), None):
        raise RequestError(f"{said}: {wrong!r} is no name. Give names, such as O B-PER I-PER, in the order of the ids.")


def tags_of_ids(rows: Iterable[Any], names: Sequence[str], said: str, column: str) -> list[list[str] | None]:
    """The names of each row's ids, which may be texts; None for a row without any. Raises RequestError for a tag that
    is no id, and for an id without a name; `said` names the table."""
    found: list[list[str] | None] = []
    for number, row in enumerate(rows, 1):
        where = f"{said}: row {number} of {column!r}"
        ids = row and [_id(tag, where) for tag in row]
        if wrong := [i for i in ids or () if i is not None and i != HIDDEN_LABEL and not 0 <= i < len(names)]:
            raise RequestError(
                f"{where} has the tag {wrong[0]}, but --tag_names names the ids from 0 to {len(names) - 1}. Give a "
                "name for each id, in their order."
            )
        found.append(names_of_ids(ids, names, where))
    return found


def _id(tag: Any, where: str) -> int | None:
    """None for an empty tag."""
    if tag is None or (isinstance(tag, str) and not tag.strip()):
        return None
    if isinstance(tag, str) and WHOLE.fullmatch(tag.strip()):
        return int(tag)
    if isinstance(tag, int | float) and float(tag).is_integer():
        return int(tag)
    raise RequestError(f"{where} has the tag {plain(str(tag)[:40])!r}, but --tag_names is for whole numbers. Drop it.")


def note_of_unused(names: Sequence[str], tags: Iterable[Sequence[str] | None]) -> str:
    """A note on names that no word has: they may be in the wrong order, or too many."""
    used = {tag for row in tags for tag in row or ()}
    unused = [plain(name) for name in names if name not in used]
    more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
    return f"no word has {', '.join(unused[:SHOWN])}{more} of --tag_names" if unused else ""
