"""The columns of each format, under their own names or others: in another case, or as well-known data sets name them.
Imports no torch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from finetune.data.columns import TOOLS
from finetune.errors import RequestError, plain

SYSTEM = "system"
MESSAGES, SHAREGPT, ALPACA = "messages", "ShareGPT", "Alpaca"
Row: TypeAlias = tuple[str, tuple[str, ...], tuple[str, ...]]  # name, required columns, optional columns
FORMATS: tuple[Row, ...] = (
    (MESSAGES, ("messages",), (TOOLS, SYSTEM)),
    (SHAREGPT, ("conversations",), (TOOLS, SYSTEM)),
    (ALPACA, ("instruction", "output"), ("input", "history", SYSTEM, TOOLS)),
    ("prompt/completion", ("prompt", "completion"), (TOOLS, SYSTEM)),
    ("prompt/response", ("prompt", "response"), (TOOLS, SYSTEM)),
    ("question/answer", ("question", "answer"), (TOOLS, SYSTEM)),
)
SYSTEM_PROMPT = "system_prompt"  # OpenOrca's name for SYSTEM
ANSWER_OF = {"question": "answer", "prompt": "response", "instruction": "output"}  # required columns that make a chat
ANSWERS = ("answer", "response", "output", "completion", "solution")  # other names for these answers
ASKING = (*ANSWER_OF, "query", "problem", "input")
BESIDE = ("context", "input")  # parts of a prompt, which only Alpaca's format reads, as `input`
NUMBERED = "column_1"  # of a csv without a header


def renames_for(
    words: Sequence[str] | None, names: Sequence[str], column: str | None, where: str, needs_all: bool = True
) -> dict[str, str]:
    """As `renames_in`, and the renames that make columns under other well-known names a format, if that is unambiguous
    and no --text_column_name `column` is given. Raises RequestError for a context that would not be read."""
    renames = renames_in(words, names, where, needs_all)
    if column is not None:
        return renames
    there = {renames.get(name, name): name for name in names}
    known = _known(there, where)
    return {old: known.get(new, new) for new, old in there.items() if known.get(new, new) != old}


def _known(there: Mapping[str, str], where: str) -> dict[str, str]:
    """Renames of the columns `there`, each with its name in the file."""
    own = _by_lower_case(there)
    found = _formats_with(there) or _formats_with(own)
    asked, answers = ([name for name in some if name in own] for some in (ANSWER_OF, ANSWERS))
    if not found and len(asked) == len(answers) == 1:
        pair = (asked[0], ANSWER_OF[asked[0]])
        found = [row for row in FORMATS if row[1] == pair]
        own[pair[1]] = own.pop(answers[0])
    if found and SYSTEM not in own and SYSTEM_PROMPT in own:
        own[SYSTEM] = own.pop(SYSTEM_PROMPT)
    if len(found) == 1:
        _refuse_context(found[0], own, there, where)
    wanted = [name for _, needed, optional in found for name in (*needed, *optional)]
    return {own[name]: name for name in wanted if own.get(name, name) != name}


def _formats_with(names: Mapping[str, str]) -> list[Row]:
    return [row for row in FORMATS if set(row[1]) <= names.keys()]


def _refuse_context(row: Row, own: Mapping[str, str], there: Mapping[str, str], where: str) -> None:
    """Raises RequestError for a part of the prompt that the format of a prompt and an answer does not read."""
    _, needed, optional = row
    beside = next((own[name] for name in BESIDE if name in own and name not in optional), None)
    if beside is None or len(needed) < 2:
        return
    asks, answer = (there[own[name]] for name in needed)
    raise RequestError(
        f"{where}: has {there[beside]} beside {asks} and {answer}, which would not be read. Join it to the prompt "
        f"with {said_mapping({asks: 'instruction', there[beside]: 'input', answer: 'output'})}, or leave it "
        f"out with {said_mapping({there[beside]: f'unused_{there[beside]}'})}."
    )


def _by_lower_case(names: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """The names by their lower case, without those that differ in case alone from another."""
    counts = Counter(map(str.lower, names))
    return {name.lower(): name for name in names if counts[name.lower()] == 1 or name == name.lower()}


def mapping_for(names: Sequence[str]) -> str:
    """The --column_mapping that makes an obvious prompt and answer among `names` a format; empty if there are none."""
    own = _by_lower_case(names)
    if NUMBERED in names:
        return said_mapping(dict(zip(names, ("prompt", "completion"), strict=False)))
    asked = next((name for name in ASKING if name in own), None)
    answer = next((name for name in ANSWERS if name in own), None)
    if asked is None or answer is None:
        return ""
    beside = next((own[name] for name in BESIDE if name in own and name != asked), None)
    if beside:
        return said_mapping({own[asked]: "instruction", beside: "input", own[answer]: "output"})
    asks = asked if asked in ANSWER_OF else "question"
    return said_mapping({own[asked]: asks, own[answer]: ANSWER_OF[asks]})


def said_mapping(renames: Mapping[str, str]) -> str:
    """The flag --column_mapping with these renames, old to new, as a shell takes it."""
    words = [shlex.quote(plain(f"{old}={new}")) for old, new in renames.items() if old != new]
    return " ".join(["--column_mapping", *words])


def _pairs_in(words: Sequence[str] | None) -> dict[str, str]:
    """Parses --column_mapping into old and new column names. Raises RequestError."""
    found: dict[str, str] = {}
    for word in words or ():
        old, equals, new = (part.strip() for part in word.partition("="))
        if not (old and equals and new) or "=" in new or old in found or new in found.values():
            several = " From Python, give several as a dict or a list." if "=" in new else ""
            raise RequestError(
                f"--column_mapping {word}: must be OLD=NEW, a column's name and its new name, each used only once."
                f"{several}"
            )
        found[old] = new
    return found


def check_mapped(words: Sequence[str] | None, tables: Sequence[Sequence[str]]) -> None:
    """Raises RequestError if --column_mapping names a column that none of the `tables` has; each is given by its
    columns' names."""
    known = list(dict.fromkeys(name for names in tables for name in names))
    for old, new in _pairs_in(words).items():
        if old not in known:
            raise RequestError(
                f"--column_mapping {old}={new}: the data has no column {old!r}; it has {', '.join(known)}."
            )


def renames_in(words: Sequence[str] | None, names: Sequence[str], where: str, needs_all: bool = True) -> dict[str, str]:
    """The renames of --column_mapping that apply to a table with columns `names`. The new names may exist already. With
    `needs_all` each column must be there under one of its names. Raises RequestError."""
    renames = _pairs_in(words)
    found = {old: new for old, new in renames.items() if old in names}
    for old, new in renames.items():
        if needs_all and old not in names and new not in names:
            raise RequestError(
                f"{where} has no column {old!r} (--column_mapping {old}={new}); it has {', '.join(names)}."
            )
        if old in found and new in names and new not in found:
            raise RequestError(
                f"{where} has a column {new!r} as well as {old!r} (--column_mapping {old}={new}). Rename that one, "
                f"too, for example with --column_mapping {new}=other_{new}."
            )
    return found
