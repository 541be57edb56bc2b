"""Checks a config file against a run: all findings at once, each with its line and column, and the fixed text. A file
that is not the config of a training run gets one message, not one per line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.dsconfig.config import Config
from finetune.dsconfig.context import Context
from finetune.dsconfig.document import Document, Edit, Slip
from finetune.dsconfig.finding import Drop, Finding, Mend, Put, Rename
from finetune.dsconfig.parse import NotJsonError, parse
from finetune.dsconfig.rules import rules_for
from finetune.dsconfig.shape import schema, shape_findings
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
    # The rules add nothing about these, except secrets.
    wrong = {finding.path for finding in about if finding.severity == "error"}
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


# ${NAME}, $NAME, {{ name }}, <name>, __NAME__, @NAME@, %(name)s; without quotes also a name in capitals.
# Lengths are bounded, and an unterminated string or comment extends to the end, so no file takes quadratic time.
MARK = (
    r"\$\{[^}\n]{0,200}\}|\$[A-Za-z_]\w{0,200}|\{\{[^}\n]{0,200}\}\}|\{%[^\n]{0,200}?%\}|<[A-Za-z][\w .-]{0,200}>"
    r"|__[A-Za-z]\w{0,200}__|@\w{1,200}@|%\(\w{1,200}\)s"
)
QUOTED = re.compile(rf'"(?P<key>\w+)"\s*:\s*"(?P<quoted>{MARK})"')
BARE = re.compile(rf"[:,\[]\s*(?P<bare>{MARK}|[A-Z][A-Z\d_]+)(?=\s*[,\]}}\n])")
TEXT_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"?)|(?:#|//)[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
LITERALS = {"TRUE", "FALSE", "NULL", "NONE", "NAN", "INF"}
# Fields that only deepspeed.init_inference has (deepspeed 0.19.8, inference/config.py). A test compares them.
OF_INFERENCE = (
    "replace_with_kernel_inject kernel_inject replace_method injection_policy injection_dict injection_policy_tuple "
    "max_out_tokens max_tokens min_out_tokens min_tokens mp_size enable_cuda_graph use_triton triton_autotune "
    "triangular_masking tm keep_module_on_host set_empty_params save_mp_checkpoint_path return_tuple training_mp_size "
    "transposed_mode ep_size moe quant zero dtype"
).split()
WITHOUT_LISTS = {"integer", "boolean", "number"}
WRAPPER = "deepspeed_config"
OF_TRAINING = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer")


def template(text: str) -> Finding | None:
    """DS009 for a text with placeholders in places where no free text is allowed."""
    code = TEXT_OR_COMMENT.sub(lambda found: found[1] or "", text)
    texts = set(_text_keys(schema()))  # a job's name may contain a dollar sign
    marks = [(mark.start(), mark["quoted"]) for mark in QUOTED.finditer(code) if mark["key"] not in texts]
    bare = TEXT_OR_COMMENT.sub(lambda found: f'"{" " * (len(found[0]) - 2)}"', code)
    marks += [(mark.start(), mark["bare"]) for mark in BARE.finditer(bare) if mark["bare"] not in LITERALS]
    if not marks:
        return None
    names = list(dict.fromkeys(name for _, name in sorted(marks)))
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    said = f"this is a template: {len(marks)} value(s) must still be filled in ({shown}). Check the filled-in file."
    return Finding("DS009", "error", (), said)


def other_program(config: dict[str, Any]) -> Finding | None:
    """DS010 for a file for DeepSpeed's inference or its autotuner, and for a config nested under a key."""
    inner = config.get(WRAPPER)
    if isinstance(inner, dict) and not any(key in config for key in (*OF_TRAINING, "zero_optimization")):
        said = f"the config is inside {WRAPPER}, as in accelerate's YAML, but no engine looks there. Move it up."
        return Finding("DS010", "error", (WRAPPER,), said)
    trains = any(key in config for key in OF_TRAINING)
    of_inference = [key for key in OF_INFERENCE if key in config]
    if of_inference and not trains and "zero_optimization" not in config:
        said = f"{of_inference[0]} is for deepspeed.init_inference: this is a config for inference, not for training."
        return Finding("DS010", "error", (of_inference[0],), said)
    zero = schema()["properties"]["zero_optimization"]["properties"]
    lists = [
        key
        for key, value in Config(config).section("zero_optimization").items()
        if isinstance(value, list) and (key == "stage" or WITHOUT_LISTS & {*zero.get(key, {}).get("type", [])})
    ]
    if len(lists) > 1 or (lists and "autotuning" in config):
        said = (
            f"zero_optimization.{lists[0]} is a list of values to try: this is a template of DeepSpeed's autotuner, "
            "which no engine reads. Check the configs that it writes."
        )
        return Finding("DS010", "error", ("zero_optimization", lists[0]), said)
    return None


def _text_keys(part: dict[str, Any]) -> Iterator[str]:
    """The keys whose values are free text."""
    for key, inner in part.get("properties", {}).items():
        kinds = inner.get("type", [])
        if kinds in ("string", ["string", "null"]) and key != "type":
            yield key
        yield from _text_keys(inner)
