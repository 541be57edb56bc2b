"""Checks a config file against a run: all findings at once, each with its line and column, and the fixed text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.document import Document, Edit, Slip
from finetune.dsconfig.finding import Drop, Finding, Mend, Put, Rename
from finetune.dsconfig.parse import NotJsonError, parse
from finetune.dsconfig.purpose import other_program, template
from finetune.dsconfig.rules import rules_for
from finetune.dsconfig.shape import shape_findings
from finetune.privacy import hidden
from finetune.safe_read import read_bounded

MAX_BYTES = 100_000  # a DeepSpeed config has a few kilobytes; a larger file is something else
SLIP_CODES = {
    "comment": "DS002",
    "trailing comma": "DS003",
    "duplicate key": "DS004",
    "quotes": "DS005",
    "comma": "DS006",
    "literal": "DS007",
    "number": "DS007",
    "control": "DS008",
    "mark": "DS008",
}


@dataclass(frozen=True)
class Placed:
    """A finding with its place in the file. Lines and columns count from 1. `mendable`: `mended` fixes it."""

    line: int
    column: int
    finding: Finding
    mendable: bool

    @property
    def is_error(self) -> bool:
        return self.finding.severity == "error"

    def without_secrets(self) -> Placed:
        return replace(self, finding=replace(self.finding, message=hidden(self.finding.message)))


@dataclass(frozen=True)
class CheckedText:
    """The findings about one text. `value` is the parsed config, None if it cannot be parsed."""

    value: object
    found: tuple[Placed, ...]

    @property
    def errors(self) -> list[Placed]:
        return [placed for placed in self.found if placed.is_error]


def read(path: Path) -> str:
    """The file's text. Raises RequestError if it is not text, or far too long for a config."""
    return read_bounded(path, MAX_BYTES, keep_mark=True)


def check(text: str, run: Context, disabled: Collection[str] = ()) -> CheckedText:
    """All findings about `text` in line order, except those whose code is in `disabled`."""
    if (is_template := template(text)) and is_template.code not in disabled:
        return CheckedText(None, (Placed(1, 1, is_template, False),))
    try:
        document = parse(text)
    except NotJsonError as error:
        place = Document(text).line_and_column(error.at)
        unreadable = Finding("DS001", "error", (), f"the file cannot be read as JSON: {error}")
        return CheckedText(None, (Placed(*place, unreadable, False),))
    if not isinstance(document.value, dict):
        kind = {list: "list", str: "text", bool: "true or false", type(None): "null"}.get(
            type(document.value), "number"
        )
        unreadable = Finding(
            "DS001", "error", (), f"the file holds a {kind}, but a DeepSpeed config is an object, {{...}}."
        )
        return CheckedText(None, (Placed(1, 1, unreadable, False),))
    if (other := other_program(document.value)) and other.code not in disabled:
        return CheckedText(document.value, (Placed(*document.place_of(other.path), other, False),))
    found = [
        Placed(*document.line_and_column(slip.at), _of_slip(slip, run), bool(slip.mend)) for slip in document.slips
    ]
    about = [*shape_findings(document.value, run.version("deepspeed"), alone=run.engine == "deepspeed")]
    wrong = {
        finding.path for finding in about if finding.severity == "error"
    }  # the rules add nothing about these, except secrets
    config = Config(document.value)
    ruled = [finding for rule in rules_for(config) for finding in rule(config, run)]
    about += [finding for finding in ruled if finding.path not in wrong or finding.code == "DS904"]
    found += [Placed(*document.place_of(finding.path), finding, bool(finding.mends)) for finding in about]
    kept = [placed.without_secrets() for placed in found if placed.finding.code not in disabled]
    return CheckedText(document.value, tuple(sorted(kept, key=lambda placed: (placed.line, placed.column))))


def mended(text: str, run: Context, disabled: Collection[str] = ()) -> str:
    """The text with every finding fixed that has exactly one fix; nothing else is changed."""
    return list(mendings(text, run, disabled))[-1]


def mendings(text: str, run: Context, disabled: Collection[str] = ()) -> Iterator[str]:
    """The original text, and the text after each fix."""
    seen = set()
    new: str | None = text
    while new is not None:
        yield new
        seen.add(new)
        texts = _next_texts(new, run, disabled)
        new = next((one for one in texts if one not in seen and _can_be_read(one)), None)


def _can_be_read(text: str) -> bool:
    try:
        parse(text)
    except NotJsonError:
        return False
    return True


def difference(before: str, after: str, name: str) -> str:
    """A unified diff with secrets hidden."""
    import difflib

    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"{name} (original)", f"{name} (fixed)"
    )
    return hidden("".join(line if line.endswith("\n") else f"{line}\n" for line in lines))


def _next_texts(text: str, run: Context, disabled: Collection[str]) -> list[str]:
    try:
        slips = [slip for slip in parse(text).slips if SLIP_CODES[slip.kind] not in disabled]
    except NotJsonError:
        return []
    texts = [_at_once(text, [slip.mend for slip in slips if slip.mend])]
    if texts == [text] and not any(
        slip.kind == "duplicate key" for slip in slips
    ):  # else it is unknown which one counts
        findings = [placed.finding for placed in check(text, run, disabled).found if placed.finding.mends]
        # By code: only after keys have their right names (DS1xx) is it known what is missing or superfluous.
        texts = [_applied(text, finding.mends) for finding in sorted(findings, key=lambda finding: finding.code)]
    return texts


def _at_once(text: str, edits: list[Edit]) -> str:
    """Apply edits from the end, so that none moves another's place; overlapping ones wait for the next round."""
    last = len(text) + 1
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        if edit.end <= last:
            text, last = edit.apply(text), edit.start
    return text


def _applied(text: str, mends: tuple[Mend, ...]) -> str:
    """Apply all fixes of a finding, or none if one of them does not apply."""
    new = text
    for mend in mends:
        edit = _edit(parse(new), mend)
        if edit is None:
            return text
        new = edit.apply(new)
    return new


def _edit(document: Document, mend: Mend) -> Edit | None:
    if isinstance(mend, Put):
        return document.setting(mend.path, mend.value)
    if mend.path not in document.spans:
        return None
    if isinstance(mend, Drop):
        return document.deletion(mend.path)
    assert isinstance(mend, Rename)
    return None if (*mend.path[:-1], mend.key) in document.spans else document.renaming(mend.path, mend.key)


def _of_slip(slip: Slip, run: Context) -> Finding:
    takers = {
        (True, True): "",
        (True, False): " DeepSpeed alone would accept it, the Trainer and accelerate do not.",
        (False, True): " The Trainer and accelerate would accept it, DeepSpeed alone does not.",
        (False, False): " Neither DeepSpeed nor the Trainer reads it as meant.",
    }
    mends = {
        "comment": " Delete it.",
        "trailing comma": " Delete the comma.",
        "duplicate key": " Keep one of them.",
        "quotes": ' Write ".',
        "comma": " Add it.",
        "number": "" if slip.mend else " Write a finite number.",
    }
    is_taken = run.engine == "deepspeed" and slip.by_hjson and slip.kind != "number"
    return Finding(
        SLIP_CODES[slip.kind],
        "warning" if is_taken else "error",
        (),
        f"{slip.message}.{takers[slip.by_hjson, slip.by_json]}{mends.get(slip.kind, '')}",
    )
