"""Parses JSON and keeps the position of every key and value, so that findings can point to it and fixes stay local.

Deviations from strict JSON whose meaning is clear (comments, trailing commas, single quotes, Python's True) become
slips with a fix, and parsing continues: DeepSpeed alone reads a config with hjson, which accepts some of these, while
the Trainer and accelerate read it with `json.load`, which accepts few.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from finetune.dsconfig.document import Document, Edit, Slip, Span, deletion_of
from finetune.dsconfig.finding import KeyPath

MAX_DEPTH = 60
BLANK = re.compile(r"[ \t\r\n]*")
COMMENT = re.compile(r"#[^\r\n]*|//[^\r\n]*|/\*.*?\*/", re.DOTALL)
WORD = re.compile(r"[^\s,:\[\]{}\"'#]+")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
LITERALS = {"true": True, "false": False, "null": None}
TO_LINE_END = re.compile(r"[ \t]*(?:\r?\n|\Z)")
PYTHON = {"True": "true", "False": "false", "None": "null"}
DECODER, LENIENT = json.JSONDecoder(), json.JSONDecoder(strict=False)


class NotJsonError(Exception):
    """Parsing cannot continue. `at` is the offset."""

    def __init__(self, at: int, message: str) -> None:
        super().__init__(message)
        self.at = at


def parse(text: str) -> Document:
    """Parse `text`. Raises NotJsonError if its meaning is unclear."""
    document = Document(text)
    reader = _Reader(document)
    document.value = reader.whole()
    document.slips.sort(key=lambda slip: slip.at)
    return document


class _Reader:
    def __init__(self, document: Document) -> None:
        self.document, self.text, self.at = document, document.text, 0

    def whole(self) -> Any:
        if self.text.startswith("\ufeff"):
            self.slip("mark", 0, "the file begins with a byte-order mark", Edit(0, 1, ""), by_hjson=True)
            self.at = 1
        self.skip()
        if self.at == len(self.text):
            self.fail("the file is empty")
        value = self.value((), self.at, self.at)
        self.skip()
        if self.at < len(self.text):
            self.fail("there is more text after the end of the config. Is a bracket closed too early?")
        return value

    def value(self, path: KeyPath, key_start: int, key_end: int) -> Any:
        if len(path) > MAX_DEPTH:
            self.fail("nested too deeply for a DeepSpeed config")
        start = self.at
        self.document.spans[path] = Span(start, start, key_start, key_end)  # so parents come before members
        here = self.text[start : start + 1]
        value: Any
        if here == "{":
            value = self.members(path)
        elif here == "[":
            value = self.items(path)
        elif here in ('"', "'"):
            value = self.string()
        else:
            value = self.word()
        self.document.spans[path] = Span(start, self.at, key_start, key_end)
        return value

    def members(self, path: KeyPath) -> dict[str, Any]:
        opening = self.at
        self.at += 1
        members: dict[str, Any] = {}
        comma = None
        while True:
            self.skip()
            if self.take("}"):
                self.trailing(comma)
                return members
            self.closed_later(opening, "}")
            key_start = self.at
            key = self.key()
            key_end = self.at
            self.skip()
            if not self.take(":"):
                self.fail(f'a colon is missing after "{key if len(key) <= 100 else key[:100] + "..."}"')
            self.skip()
            self.closed_later(opening, "}")
            where = (*path, key)
            first = self.document.spans.pop(where, None)
            if first:
                for inner in _paths_below(where, members[key]):
                    self.document.spans.pop(inner, None)
            value = self.value(where, key_start, key_end)
            if first:
                self.twice(key, first, members[key], value, key_start)
            members[key] = value
            comma = self.separator("}")

    def items(self, path: KeyPath) -> list[Any]:
        opening = self.at
        self.at += 1
        items: list[Any] = []
        comma = None
        while True:
            self.skip()
            if self.take("]"):
                self.trailing(comma)
                return items
            self.closed_later(opening, "]")
            items.append(self.value((*path, len(items)), self.at, self.at))
            comma = self.separator("]")

    def separator(self, closing: str) -> int | None:
        """The position of the comma after a member, if any; a missing one becomes a slip."""
        end = self.at
        self.skip()
        if self.take(","):
            return self.at - 1
        following = self.text[self.at : self.at + 1]
        if following and following != closing:
            if following in "}]:":
                self.fail(f'"{closing}" or a comma is missing')
            next_line = "\n" in self.text[end : self.at]
            self.slip("comma", end, "a comma is missing", Edit(end, end, ","), by_hjson=next_line)
        return None

    def trailing(self, comma: int | None) -> None:
        if comma is not None:
            self.slip("trailing comma", comma, "a comma before the bracket", Edit(comma, comma + 1, ""), by_hjson=True)

    def twice(self, key: str, first: Span, before: Any, value: Any, at: int) -> None:
        line, _ = self.document.line_and_column(first.key_start)
        message = f'the key "{key}" is given twice in one object (first in line {line})'
        mend = deletion_of(first, self.text) if before == value else None
        self.slip("duplicate key", at, message, mend, by_json=True)

    def key(self) -> str:
        if self.text[self.at] in "\"'":
            return str(self.string())
        word = WORD.match(self.text, self.at)
        if not word:
            self.fail("a key in double quotes is expected")
        self.at = word.end()
        mend = Edit(word.start(), word.end(), json.dumps(word.group()))
        self.slip("quotes", word.start(), f"the key {word.group()} has no quotes", mend, by_hjson=True)
        return word.group()

    def string(self) -> str:
        start = self.at
        if self.text[start] == "'":
            end = re.compile(r"'((?:[^'\\\n]|\\.)*)'").match(self.text, start)
            if not end:
                self.fail("the closing quote is missing")
            self.at = end.end()
            plain = self.unescaped(end.group(1))
            mend = Edit(start, self.at, json.dumps(plain))
            self.slip("quotes", start, "JSON strings take double quotes", mend, by_hjson=True)
            return plain
        try:
            value, self.at = DECODER.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            if "control character" not in error.msg:
                self.at = error.pos
                unclosed = error.msg.startswith("Unterminated")
                self.fail("the closing quote is missing" if unclosed else error.msg[:1].lower() + error.msg[1:])
            try:
                value, self.at = LENIENT.raw_decode(self.text, start)
            except json.JSONDecodeError:
                self.fail("the closing quote is missing")
            if "\n" in value:
                self.fail("a string continues past the end of its line, or its closing quote is missing", start)
            mend = Edit(start, self.at, json.dumps(value))
            self.slip("control", start, "a string holds a raw control character", mend)
        return str(value)

    def unescaped(self, inside: str) -> str:
        """The text between single quotes, with backslashes as in JSON."""
        quoted = re.sub(r"\\'", "'", re.sub(r'(?<!\\)"', r"\"", inside))
        try:
            return str(json.loads(f'"{quoted}"', strict=False))
        except json.JSONDecodeError as error:
            self.fail(error.msg[:1].lower() + error.msg[1:])

    def word(self) -> Any:
        found = WORD.match(self.text, self.at)
        if not found:
            self.fail(f"a value is expected, but there is {self.text[self.at : self.at + 1]!r}")
        word, start = found.group(), self.at
        self.at = found.end()
        if word in LITERALS:
            return LITERALS[word]
        if NUMBER.fullmatch(word):
            try:
                number: Any = json.loads(word)
            except ValueError:  # more digits than Python reads (sys.get_int_max_str_digits)
                number = float("inf")
            if number in (float("inf"), float("-inf")):
                self.slip("number", start, "a number is too large", None, by_hjson=True, by_json=True)
            return number
        if word in PYTHON:
            mend = Edit(start, self.at, PYTHON[word])
            self.slip("literal", start, f"{word} is Python; JSON writes {PYTHON[word]}", mend)
            return LITERALS[PYTHON[word]]
        if word in ("NaN", "Infinity", "-Infinity"):
            self.slip("number", start, f"{word} is not a JSON number", None, by_json=True)
            return word
        number = _number_of_another_language(word)
        if number is None:
            mend = Edit(start, self.at, json.dumps(word))
            # hjson reads an unquoted string to the end of its line, including a comma or a bracket.
            ends = TO_LINE_END.match(self.text, self.at) is not None
            self.slip("quotes", start, "a string has no quotes", mend, by_hjson=ends)
            return word
        mend = Edit(start, self.at, json.dumps(number))
        self.slip("number", start, f"{word} is not how JSON writes the number {json.dumps(number)}", mend)
        return number

    def skip(self) -> None:
        """Skip whitespace and comments; each comment is a slip."""
        while True:
            blank = BLANK.match(self.text, self.at)
            self.at = blank.end() if blank else self.at
            comment = COMMENT.match(self.text, self.at)
            if not comment:
                if self.text.startswith("/*", self.at):
                    self.fail("a comment is not closed")
                return
            self.at = comment.end()
            line_start = self.text.rfind("\n", 0, comment.start()) + 1
            alone = not self.text[line_start : comment.start()].strip() and self.text[self.at : self.at + 1] == "\n"
            mend = Edit(line_start, self.at + 1, "") if alone else self._without(comment.start(), self.at)
            self.slip("comment", comment.start(), "JSON has no comments", mend, by_hjson=True)

    def _without(self, start: int, end: int) -> Edit:
        while start > 0 and self.text[start - 1] in " \t":
            start -= 1
        return Edit(start, end, "")

    def take(self, character: str) -> bool:
        if self.text.startswith(character, self.at):
            self.at += 1
            return True
        return False

    def closed_later(self, opening: int, closing: str) -> None:
        if self.at == len(self.text):
            line, _ = self.document.line_and_column(opening)
            self.fail(f'the file ends too early: "{closing}" is missing for line {line}')

    def slip(
        self, kind: str, at: int, message: str, mend: Edit | None, by_hjson: bool = False, by_json: bool = False
    ) -> None:
        self.document.slips.append(Slip(kind, at, message, by_hjson, by_json, mend))

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise NotJsonError(self.at if at is None else at, message)


def _paths_below(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """The paths of all members and items inside `value`, which is at `path`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from _paths_below((*path, key), inner)


def _number_of_another_language(word: str) -> int | float | None:
    """+1, .5, 1., 1_000, 007 and 0x10 are numbers in Python, C or YAML, but not in JSON."""
    for convert in (lambda: int(word, 10), lambda: float(word), lambda: int(word, 0)):
        try:
            number: int | float = convert()
        except ValueError:
            continue
        return number if number == number and number not in (float("inf"), float("-inf")) else None
    return None
