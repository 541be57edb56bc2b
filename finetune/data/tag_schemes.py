"""Converts word tags of CoNLL text from any common scheme to BIO, which `pipeline` groups into entities.

B- begins an entity and I- continues it; L- or E- ends one, U- or S- is a single-word entity. In IOB1 an entity begins
with I-, and with B- only directly after another entity of its type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.data.charset import UTF8
from finetune.errors import RequestError
from finetune.run.flag import NUMBER

PARSED = (".json", ".jsonl", ".parquet", ".csv")  # every other file is CoNLL text
OUTSIDE = "O"  # the tag of words outside entities
COMMENT = re.compile(r"#\s*\S+\s*=|#\s*(begin|end)\s+document|#\s*new(doc|par)\b")
PREFIXES = {"B": "B", "I": "I", "M": "I", "L": "L", "E": "L", "U": "U", "S": "U", "W": "U"}
# B_PER, b-per and B:PER; PER-B. The separator is one of these, or another dash.
MARK = "[-_/:|.\u2010-\u2015\u2212]"
SPELLINGS = (re.compile(rf"(?P<prefix>\w){MARK}(?P<kind>.+)"), re.compile(rf"(?P<kind>.+){MARK}(?P<prefix>\w)"))
UNTYPED = "entity"  # the type if tags are just B and I
MARKS = ",;|"  # column separators of other table formats
NAMED_BY_FLAG = "or name the ids with --tag_names, in their order from 0: --tag_names O B-person I-person"
SHOWN = 5


def read_conll(path: Path, said: str = "") -> Iterator[tuple[list[str], list[str] | None, int]]:
    """Yields each sentence's words and tags, and its first line number. Words are the first column and tags the last;
    tabs or spaces separate columns. A blank line or -DOCSTART- ends a sentence; comments before a sentence are skipped.
    A one-column file has only words. `said` names the file in errors (RequestError)."""
    words: list[str] = []
    tags: list[str] = []
    width = 0
    with path.open(encoding=UTF8) as file:
        for number, line in enumerate(file, 1):
            cells = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
            if not line.strip() or cells[0] == "-DOCSTART-":
                if words:
                    yield words, tags if width > 1 else None, number - len(words)
                words, tags = [], []
                continue
            if not words and _is_comment(line, cells, width):
                continue
            width = width or len(cells)
            if len(cells) != width:
                raise RequestError(
                    f"{said or path}: line {number} has {len(cells)} columns, but the lines before it have {width}. "
                    "Every line needs a word, its tag, and the same number of columns between them. Fix it."
                )
            words.append(cells[0])
            tags.append(cells[-1].strip())
    if words:
        yield words, tags if width > 1 else None, number + 1 - len(words)


def _is_comment(line: str, cells: Sequence[str], width: int) -> bool:
    """Whether it is `# sent_id = 1`, `#begin document (x); part 0`, or another # line that is not a tagged word."""
    if not line.startswith("#") or cells[-1] == OUTSIDE or _has_prefix(cells[-1]):
        return False
    return len(cells) != (width or 2) or COMMENT.match(line) is not None


def _has_prefix(tag: str) -> bool:
    return tag[1:2] == "-" and tag[:1] in PREFIXES and bool(tag[2:])


@dataclass(frozen=True)
class Scheme:
    """How tags mark where an entity begins. `name` is for messages."""

    name: str
    has_prefixes: bool
    merges: bool = True  # for plain types: adjacent words of one type form one entity


def refuse_untagged(words: Sequence[str], said: str) -> None:
    """Raises RequestError for a one-column file; guesses the cause from some of its lines."""
    mark = next((mark for mark in MARKS if all(mark in word for word in words)), None)
    found = f"columns are separated by {mark!r}" if mark else "each line is one word without a tag"
    raise RequestError(f"{said}: {found}. Give a word and its tag on each line, separated by a tab or spaces.")


def not_named(said: str, column: str, what: str, such_as: str) -> RequestError:
    """The error for a column that does not hold tag names."""
    return RequestError(
        f"{said}: {column!r} holds no {what}{such_as}. Give tag names, such as B-person and O, or ids of a data set "
        f"that names them, {NAMED_BY_FLAG}."
    )


def spelt_alike(rows: Sequence[Sequence[str] | None], said: str) -> tuple[list[list[str]], str]:
    """Normalizes prefixed tags, however spelled, to the form B-PER; also returns a note on what changed. Raises
    RequestError if only some tags have a prefix; `said` names their source."""
    tags = {tag for row in rows for tag in row or ()}
    inside = {tag for tag in tags if tag.upper() != OUTSIDE}
    alone = {tag: f"{tag.upper()}-{UNTYPED}" for tag in inside if tag.upper() in PREFIXES}
    is_untyped = {"B", "I"} <= {PREFIXES[tag.upper()] for tag in alone}
    names: dict[str, str] = {}
    for spelt in [alone] if is_untyped else [_by_prefix(inside, one) for one in SPELLINGS]:
        bare = inside - spelt.keys()
        going_on = {name[2:] for name in spelt.values() if name[0] == "I"}
        if bare and any(kind in bare or f"B-{kind}" in spelt.values() for kind in going_on):
            raise _mixed(bare, said)
        if not (names or bare) and any(name[0] in "BI" for name in spelt.values()):
            names = spelt | dict.fromkeys(tags - inside, OUTSIDE)
    changed = sorted(tag for tag, name in names.items() if tag != name)
    if not changed:
        return [list(row or ()) for row in rows], ""
    note = f"tags are rewritten: {changed[0]} is read as {names[changed[0]]}"
    return [[names[tag] for tag in row or ()] for row in rows], note


def _by_prefix(tags: Iterable[str], spelling: re.Pattern[str]) -> dict[str, str]:
    found = {tag: one for tag in tags if (one := spelling.fullmatch(tag)) and one["prefix"].upper() in PREFIXES}
    return {tag: f"{one['prefix'].upper()}-{one['kind']}" for tag, one in found.items()}


def _mixed(bare: Iterable[str], said: str) -> RequestError:
    return RequestError(
        f"{said}: some tags begin with B-, I- or a similar prefix, others do not: {', '.join(sorted(bare)[:SHOWN])}. "
        "Give every tag a prefix, or none; tag words outside entities O."
    )


def find_scheme(rows: Sequence[Sequence[str] | None], said: str) -> tuple[Scheme, str]:
    """The scheme of all tags together, and a note about it, empty for valid BIO. Raises RequestError for numbers, and
    if only some tags have a prefix; `said` names their source."""
    kinds = Counter(tag for row in rows for tag in row or () if tag != OUTSIDE)
    if numbers := [tag for tag in kinds if NUMBER.fullmatch(tag)]:
        raise RequestError(
            f"{said}: tags are numbers ({', '.join(sorted(numbers)[:SHOWN])}), which do not say which words are "
            f"outside entities. Write tag names, such as B-person and O, {NAMED_BY_FLAG}."
        )
    bare = [tag for tag in kinds if not _has_prefix(tag)]
    if bare and len(bare) < len(kinds):
        raise _mixed(bare, said)
    if bare:
        merges = any(OUTSIDE in (row or ()) for row in rows)
        how = "adjacent words of one type are one entity" if merges else "every word is a separate entity"
        return Scheme("plain", False, merges), f"plain tags: {how}"
    prefixes = {PREFIXES[tag[0]] for tag in kinds}
    if prefixes & {"L", "U"}:
        name = "BIOES" if any(tag[0] in "ES" for tag in kinds) else "BILOU"
        broken = _broken(rows)
        said = f"; {broken:,} tags continue an entity that did not begin, and now begin one" if broken else ""
        return Scheme(name, True), f"{name} tags, read as BIO{said}"
    broken = _broken(rows)
    if broken and _is_iob1(rows):
        return Scheme("IOB1", True), "IOB1 tags, read as BIO"
    said = f"{broken:,} tags I- continue an entity that did not begin, and now begin one" if broken else ""
    return Scheme("BIO", True), said


def _broken(rows: Sequence[Sequence[str] | None]) -> int:
    """How many tags continue an entity that is not open."""
    return sum(
        1
        for row in rows
        for tag, made in zip(row or (), to_bio(row or (), Scheme("BIO", True)), strict=True)
        if PREFIXES.get(tag[0]) in ("I", "L") and tag != OUTSIDE and made[0] == "B"
    )


def _is_iob1(rows: Sequence[Sequence[str] | None]) -> bool:
    """Whether every B- separates adjacent entities of one type, its only use in IOB1."""
    return all(
        i > 0 and row[i - 1][2:] == tag[2:] for row in rows if row for i, tag in enumerate(row) if tag.startswith("B-")
    )


def to_bio(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """A sentence's tags as BIO. A tag that continues an entity that is not open begins a new one."""
    made = []
    open_type = None
    for tag in tags:
        prefix, kind = (PREFIXES[tag[0]], tag[2:]) if scheme.has_prefixes and tag != OUTSIDE else ("I", tag)
        if tag == OUTSIDE:
            made.append(OUTSIDE)
            open_type = None
            continue
        begins = prefix in ("B", "U") or kind != open_type or not scheme.merges
        made.append(("B-" if begins else "I-") + kind)
        open_type = None if prefix in ("L", "U") else kind
    return made
