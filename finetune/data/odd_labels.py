"""Labels that may be mistakes: missing-value markers, one name in several spellings, lists and objects among names.
Imports no torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.columns import MAX_SHOWN, SHOWN_CHARACTERS, Labels, by_text, is_empty, is_number, label_text
from finetune.errors import RequestError, plain

MISSING = frozenset("NA|N/A|n/a|#N/A|#NA|<NA>|NaN|nan|NULL|null".split("|"))  # missing in pandas, R and SQL
PERHAPS_MISSING = MISSING | {"None", "none"}
FEW_SHARE = 0.1  # of the rows; above it the word may be a real class, such as NA for North America
TRUTHS = dict.fromkeys(("true", "t", "yes", "y", "1"), "true") | dict.fromkeys(("false", "f", "no", "n", "0"), "false")
RARE, FREQUENT = 2, 100  # a label with at most RARE uses may be a typo for one with at least FREQUENT
DIGITS = re.compile(r"\d+")


def countable(value: Any) -> Any:
    """A label as a Counter key: Python treats True as 1."""
    return str(value) if isinstance(value, bool) else value


def missing_words(counts: Counter[Any]) -> tuple[str, ...]:
    """The training labels that mark a missing value and so are not classes: the other labels are all numbers, or these
    are few. `counts` maps raw labels to their number of rows."""
    names = by_text(counts)
    found = MISSING.intersection(names)
    others = names.keys() - found
    is_sure = all(map(is_number, others)) or sum(names[name] for name in found) <= FEW_SHARE * counts.total()
    return tuple(sorted(found)) if others and is_sure else ()


def missing_labels(values: Mapping[str, Sequence[Any]], known: Labels | None) -> dict[str, tuple[str, ...]]:
    """The missing-value labels of each split, from the raw labels of all splits. Labels that a trained model, `known`,
    already has are classes."""
    names = {split: [label_text(value) for value in column if not is_empty(value)] for split, column in values.items()}
    counts = Counter(names.get("train", ()))
    classes = set(counts).difference(missing_words(counts)) | set(known.ids if known else ())
    return {split: tuple(sorted(MISSING.intersection(found) - classes)) for split, found in names.items()}


def said_missing(words: Sequence[str]) -> str:
    """What an error message adds about such labels; empty if there are none."""
    names = " and ".join(map(repr, words))
    return f" {names} counts as no label; rename a class that has this name." if words else ""


def refuse_nested(values: Sequence[Any], label: str, said: str) -> None:
    """Raises RequestError for a label that is an object, or a list among single labels; `said` names the table."""
    for row, value in enumerate(values, 1):
        if isinstance(value, list | dict):
            what = "an object" if isinstance(value, dict) else "a list, and others are not"
            mend = "the name alone" if isinstance(value, dict) else "every row a list, or every row one name"
            raise RequestError(
                f"{said}: row {row} of {label!r} is {plain(str(value))[:SHOWN_CHARACTERS]}, {what}. Give {mend}."
            )


def notes_of_names(names: Sequence[str], label: str) -> list[str]:
    """Warnings about classes that may be mistakes."""
    return [*_note_of_missing(names, label), *_note_of_spellings(names, label)]


def note_of_slips(counts: Mapping[str, int], what: str) -> str:
    """A warning about rare labels that differ by one letter from a frequent one. Names that differ only in their digits
    do not count."""
    frequent = [name for name, count in counts.items() if count >= FREQUENT]
    found = [
        f"{plain(name)[:SHOWN_CHARACTERS]!r} ({count}) for {plain(near)[:SHOWN_CHARACTERS]!r} ({counts[near]:,})"
        for name, count in counts.items()
        if count <= RARE and (near := next((one for one in frequent if _is_slip(name, one)), None))
    ]
    if not found:
        return ""
    more = f", and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    return f"{what} that may be misspelt, each a separate class: {', '.join(found[:MAX_SHOWN])}{more}"


def _is_slip(one: str, other: str) -> bool:
    """Whether they differ by one letter inserted, deleted or replaced, or by two adjacent letters swapped."""
    short, long = sorted((one, other), key=len)
    if len(short) < 3 or len(long) - len(short) > 1 or DIGITS.sub("", short) == DIGITS.sub("", long):
        return False
    same = next((i for i, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(short))
    a, b = short[same:], long[same:]
    if len(short) < len(long):
        return a == b[1:]
    return a[1:] == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _note_of_missing(names: Sequence[str], label: str) -> list[str]:
    found = [name for name in names if name in PERHAPS_MISSING]
    words = " and ".join(map(repr, found))
    return [f"{label}: {words} is a class; if it means a missing label, leave these rows out"] if found else []


def _note_of_spellings(names: Sequence[str], label: str) -> list[str]:
    are_numbers = all(map(is_number, names))
    folded = {name: str(float(name)) if are_numbers else "".join(name.split()).casefold() for name in names}
    are_truths = not are_numbers and all(name in TRUTHS for name in folded.values())
    alike: dict[str, list[str]] = defaultdict(list)
    for name, key in folded.items():
        alike[TRUTHS[key] if are_truths else key].append(plain(name)[:SHOWN_CHARACTERS])
    several = [" and ".join(map(repr, spellings)) for spellings in alike.values() if len(spellings) > 1]
    if not several:
        return []
    more = f", and {len(several) - MAX_SHOWN} more" if len(several) > MAX_SHOWN else ""
    one = "truth value" if are_truths else "number" if are_numbers else ""
    what = f"that may be one {one} in several spellings" if one else "that differ only in case or spaces"
    return [f"{label}: labels {what}, each a separate class: {', '.join(several[:MAX_SHOWN])}{more}"]
