"""Finds where a template writes each part of each turn: puts the parts between sentinels, renders, and searches. The
result counts only if the rendering minus the sentinels is identical to the plain one.

A sentinel consists of digits, which survive JSON and case changes. It contains a single 1, its first digit, so that
digits before it cannot shift where it seems to begin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from finetune.data.chat.turns import ASSISTANT, CLOSES_THOUGHT, RULERS, THOUGHTS, Turn

WIDTH = 6  # digits of a sentinel's number, in base 8
DIGITS = "23456789"
# Templates split contents here: the text between tags is a separate part, without the whitespace that templates strip.
TAGS = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")
WORDS, THOUGHT, CALL = "words", "thought", "call"
# Whether to mark all roles except the system's, whose message a template may move anywhere; and whether to keep
# whitespace inside the marks. The first way that does not change the rendering is taken.
WAYS = ((True, True), (True, False), (False, True), (False, False))

Render = Callable[[list[Turn]], str | None]  # None if the template rejects the turns


@dataclass(frozen=True)
class Part:
    """Characters `start` to `end` of the plain rendering; both -1 if the template leaves the part, `text`, out."""

    turn: int
    kind: str
    text: str
    start: int
    end: int

    @property
    def is_there(self) -> bool:
        return self.start >= 0


@dataclass(frozen=True)
class Located:
    """`parts` in the order of the turns; `seen` is the rendering minus the sentinels, and `is_exact` if it equals the
    plain one."""

    parts: tuple[Part, ...]
    seen: str
    is_exact: bool


def locate(render: Render, turns: list[Turn], whole: str) -> Located:
    """Locates the parts of `turns`, whose plain rendering is `whole`."""
    nonce = next(n for n in map(_nonce, count()) if n not in whole and n not in repr(turns))
    found = Located((), "", False)
    for marks_all, keeps_blanks in WAYS:
        pen = _Pen(nonce, keeps_blanks)
        marked = [
            pen.turn(i, turn) if turn["role"] == ASSISTANT or (marks_all and turn["role"] not in RULERS) else turn
            for i, turn in enumerate(turns)
        ]
        rendered = render(marked)
        read = _read(rendered or "", nonce, pen.planned, whole)
        found = read if rendered is not None else Located(read.parts, found.seen, False)
        if found.is_exact:
            break
    return found


def sentinels(text: str) -> tuple[str, str]:
    """Two sentinels that do not occur in `text`."""
    nonce = next(n for n in map(_nonce, count()) if n not in text)
    return nonce + _number(0), nonce + _number(1)


def _nonce(number: int) -> str:
    return "1907" + _number(number)


def _number(number: int) -> str:
    return "".join(DIGITS[int(digit)] for digit in f"{number:0{WIDTH}o}")


def _read(rendered: str, nonce: str, planned: list[tuple[int, str, str]], whole: str) -> Located:
    places: dict[int, list[int]] = {}
    pieces: list[str] = []
    at = length = 0
    for match in re.finditer(f"{nonce}([{DIGITS}]{{{WIDTH}}})", rendered):
        pieces.append(rendered[at : match.start()])
        length += match.start() - at
        at = match.end()
        number = int("".join(str(DIGITS.index(digit)) for digit in match[1]), 8)
        places.setdefault(number, []).append(length)
    seen = "".join([*pieces, rendered[at:]])
    parts, is_exact, last = [], seen == whole, (-1, -1)
    for i, (turn, kind, text) in enumerate(planned):
        starts, ends = places.get(2 * i, []), places.get(2 * i + 1, [])
        # A part that is cut, written twice or reordered leaves unclear who says what. Only the name of a call may occur
        # again, next to its result.
        once = len(starts) <= 1 or kind == CALL
        is_exact = is_exact and once and len(starts) == len(ends) and (not starts or starts[0] <= ends[0])
        if starts and ends:
            is_exact = is_exact and (last[0] == turn or last[1] <= starts[0])
            last = (turn, max(ends[0], last[1]))
        place = (starts[0], ends[0]) if starts and ends else (-1, -1)
        parts.append(Part(turn, kind, text, *place))
    return Located(tuple(parts), seen, is_exact)


class _Pen:
    """Writes sentinels in pairs, and records which part of which turn each pair encloses, with its text."""

    def __init__(self, nonce: str, keeps_blanks: bool) -> None:
        self.nonce, self.keeps_blanks = nonce, keeps_blanks
        self.planned: list[tuple[int, str, str]] = []

    def turn(self, number: int, turn: Turn) -> Turn:
        turn = dict(turn)
        for name in THOUGHTS:
            if isinstance(turn.get(name), str):
                turn[name] = self._between(turn[name], number, THOUGHT)
        if "content" in turn:
            turn["content"] = "".join(self._content(turn["content"], number))
        if "tool_calls" in turn:
            turn["tool_calls"] = [self._call(call, number) for call in turn["tool_calls"]]
        return turn

    def _content(self, content: str, number: int) -> Iterator[str]:
        pieces = TAGS.split(content)
        closes = max((i for i, piece in enumerate(pieces) if piece == CLOSES_THOUGHT), default=-1)
        for i, piece in enumerate(pieces):
            yield piece if i % 2 else self._between(piece, number, THOUGHT if i < closes else WORDS)

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        inner = call.get("function")
        if isinstance(inner, dict):
            return {**call, "function": self._call(inner, number)}
        marked = dict(call)
        if isinstance(call.get("name"), str):
            marked["name"] = self._between(call["name"], number, CALL)
        if "arguments" in call:
            marked["arguments"] = self._leaves(call["arguments"], number)
        return marked

    def _leaves(self, value: Any, number: int) -> Any:
        if isinstance(value, str):
            return self._between(value, number, CALL)
        if isinstance(value, dict):
            return {name: self._leaves(one, number) for name, one in value.items()}
        return [self._leaves(one, number) for one in value] if isinstance(value, list) else value

    def _between(self, text: str, number: int, kind: str) -> str:
        inside = text if self.keeps_blanks else text.strip()
        if not text.strip():
            return text
        before, after = text.split(inside, 1)
        i = len(self.planned)
        self.planned.append((number, kind, text))
        return f"{before}{self._mark(2 * i)}{inside}{self._mark(2 * i + 1)}{after}"

    def _mark(self, number: int) -> str:
        return self.nonce + _number(number)
