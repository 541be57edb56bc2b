"""A config as text: the value and the position of every key, and edits that change one without touching the rest."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from finetune.dsconfig.finding import KeyPath


@dataclass(frozen=True)
class Edit:
    """Replace `start:end` with `text`."""

    start: int
    end: int
    text: str

    def apply(self, to: str) -> str:
        return to[: self.start] + self.text + to[self.end :]


@dataclass(frozen=True)
class Span:
    """The position of a value, and of its key if it has one. Offsets count characters from the file's start."""

    start: int
    end: int
    key_start: int
    key_end: int


@dataclass(frozen=True)
class Slip:
    """Something that is not strict JSON. `by_hjson`: whether DeepSpeed accepts it; `by_json`: the Trainer."""

    kind: str
    at: int
    message: str
    by_hjson: bool
    by_json: bool
    mend: Edit | None


@dataclass
class Document:
    """A config as text, with its value and positions."""

    text: str
    value: Any = None
    spans: dict[KeyPath, Span] = field(default_factory=dict)
    slips: list[Slip] = field(default_factory=list)

    def line_and_column(self, at: int) -> tuple[int, int]:
        """Both count from 1, as in editors."""
        line = self.text.count("\n", 0, at) + 1
        return line, at - (self.text.rfind("\n", 0, at) + 1) + 1

    def place_of(self, path: KeyPath) -> tuple[int, int]:
        """Line and column of the key at `path`, or of its nearest ancestor."""
        while path and path not in self.spans:
            path = path[:-1]
        return self.line_and_column(self.spans[path].key_start if path in self.spans else 0)

    def setting(self, path: KeyPath, value: Any) -> Edit | None:
        """The edit that sets the value at `path`. None if the object that should hold it is absent."""
        new = json.dumps(value)
        if path in self.spans:
            return Edit(self.spans[path].start, self.spans[path].end, new)
        *above, key = path
        parent = self.spans.get(tuple(above))
        if parent is None or self.text[parent.start] != "{":
            return None
        member = f"{json.dumps(key)}: {new}"
        members = [span for at, span in self.spans.items() if at[:-1] == tuple(above) and at]
        if not members:
            return Edit(parent.start, parent.end, "{" + member + "}")
        first, last = members[0], members[-1]
        gap = re.search(r"\r?\n[ \t]*\Z", self.text[parent.start + 1 : first.key_start])
        return Edit(last.end, last.end, "," + (gap.group() if gap else " ") + member)

    def deletion(self, path: KeyPath) -> Edit:
        """The edit that removes a member and its comma."""
        return deletion_of(self.spans[path], self.text)

    def renaming(self, path: KeyPath, key: str) -> Edit:
        """The edit that renames a member's key."""
        return Edit(self.spans[path].key_start, self.spans[path].key_end, json.dumps(key))


def deletion_of(span: Span, text: str) -> Edit:
    """The edit that removes a member and its comma from `text`."""
    after = re.compile(r"\s*,\s*").match(text, span.end)
    if after:
        return Edit(span.key_start, after.end(), "")
    before = text[: span.key_start].rstrip().removesuffix(",").rstrip()
    return Edit(len(before), span.end, "")
