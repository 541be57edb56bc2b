"""The answers of a question's row, in each form that data sets have, and their places in the context. Imports no
torch."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from finetune.data.columns import is_empty, number_in
from finetune.errors import RequestError, plain

ANSWERS, TEXT, START = "answers", "text", "answer_start"
ALONE = ("answer", "answer_text", TEXT)  # other names for a column of answers that are texts
NO_PLACE = 'answers do not have texts with answer_start, as {"text": [...], "answer_start": [...]} has'
NOT_ONCE = "the context does not have the answer exactly once as whole words, so its answer_start must be given"
ELSEWHERE = "the context does not have the answer's text at its answer_start, in characters from 0"
# Scripts, as Unicode names their letters, that put no blanks between words, or, as Hangul, none before particles.
APART = re.compile(r"(HALFWIDTH )?(CJK|HIRAGANA|KATAKANA|HANGUL|THAI|LAO|KHMER|MYANMAR|TIBETAN)\b")
SHOWN_CHARACTERS = 60

Found: TypeAlias = tuple[list[Any], list[Any]]  # texts, and their first characters in the context


def answers_of(row: Mapping[str, Any], said: str) -> tuple[Found | None, str]:
    """Texts and starts of a row's answers, and what is wrong with them, if anything. Raises RequestError, naming the
    table as `said`, for objects that are written as a text."""
    given, context = row.get(ANSWERS), str(row["context"])
    if isinstance(given, str) and given.strip():
        if given.lstrip()[0] in "{[" and START in given:
            raise RequestError(
                f"{said}: {ANSWERS!r} holds objects as texts, such as {plain(given[:SHOWN_CHARACTERS])}, but texts, as "
                'all cells of a csv are, are not read as objects. Give .jsonl or .parquet with {"text": [...], '
                f'"{START}": [...]}}, or two columns: {ANSWERS} with the text alone, and {START} with its number.'
            )
        found = _with_start(given, row[START]) if not is_empty(row.get(START)) else _located(given.strip(), context)
        return found, "" if found else NOT_ONCE if is_empty(row.get(START)) else NO_PLACE
    found = _of_objects([] if is_empty(given) or not given else given)
    return found, "" if found else NO_PLACE


def fault_of(context: Any, found: Found) -> str:
    """The fault of answers that are not in the context where they should be; empty if there is none."""
    for text, start in zip(*found, strict=True):
        is_place = isinstance(text, str) and text.strip() and isinstance(start, int) and start >= 0
        if not is_place or not str(context).startswith(text, start):
            return ELSEWHERE
    return ""


def has_answer(given: Any) -> bool:
    """Whether a cell holds an answer in any form."""
    return bool(given.strip()) if isinstance(given, str) else any(_of_objects(given) or ())


def column_of_answers(names: Sequence[str]) -> str | None:
    """The column that seems to hold answers as texts, under another name."""
    lower = {name.lower(): name for name in names}
    return next((lower[name] for name in (ANSWERS, *ALONE) if name in lower), None)


def note_of_texts(rows: Sequence[Mapping[str, Any]]) -> str:
    """A note if answers are texts that had to be located."""
    are_alone = any(
        isinstance(row.get(ANSWERS), str) and has_answer(row[ANSWERS]) and is_empty(row.get(START)) for row in rows
    )
    return "answers without answer_start are located, each where its context has it once as whole words" * are_alone


def _of_objects(found: Any) -> Found | None:
    """From SQuAD's list of objects or the hub's object of lists; None for any other form."""
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        found = {name: [one.get(name) for one in found] for name in (TEXT, START)}
    texts, starts = (found.get(TEXT), found.get(START)) if isinstance(found, Mapping) else (None, None)
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        return None
    return texts, starts


def _with_start(text: str, start: Any) -> Found | None:
    """From a text and a number, which may be written as a text; None for another start."""
    number = number_in(str(start))
    return ([text], [int(number)]) if number is not None and number.is_integer() else None


def _located(text: str, context: str) -> Found | None:
    """From a text that the context has exactly once as whole words ("no" is not in "know"); None for any other."""
    places, at = list[int](), context.find(text)
    while at >= 0:
        end = at + len(text)
        if not _go_on(context[:at][-1:], text[0]) and not _go_on(text[-1], context[end : end + 1]):
            places.append(at)
        at = context.find(text, at + 1)
    return ([text], places) if len(places) == 1 else None


def _go_on(one: str, other: str) -> bool:
    """Whether the two characters are within one word."""
    return all(
        letter and unicodedata.category(letter)[0] in "LMN" and not APART.match(unicodedata.name(letter, ""))
        for letter in (one, other)
    )
