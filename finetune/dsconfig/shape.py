"""DS1xx: keys and types of values, checked with the JSON Schema that was generated from DeepSpeed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from finetune.dsconfig.context import release
from finetune.dsconfig.finding import Drop, Finding, KeyPath, Mend, Put, Rename, named

SCHEMA = Path(__file__).with_name("schema.json")
# Keys that DeepSpeed has removed, the release, and what to use instead (deepspeedai/DeepSpeed#8489; runtime/config.py
# in 0.19.7 and 0.19.8). A test compares the names with the installed DeepSpeed.
REMOVED = {
    "amp": ("0.19.8", 'Use "bf16" or "fp16".'),
    "compression_training": ("0.19.7", "Quantize the trained model with a library for it, such as torchao."),
    "curriculum_learning": ("0.19.8", "It is now data_efficiency.data_sampling.curriculum_learning."),
    "eigenvalue": ("0.19.8", "Delete it."),
    "elasticity": ("0.19.8", "Set the batch sizes directly, and resume at another number of ranks."),
    "graph_harvesting": ("0.19.8", 'Delete it, or use "compile".'),
    "nebula": ("0.19.7", "Delete it: torch writes checkpoints."),
    "progressive_layer_drop": ("0.19.8", "Delete it."),
    "quantize_training": ("0.19.7", "Quantize the trained model with a library for it, such as torchao."),
    "sparse_attention": ("0.19.7", "Delete it, and choose the model's attn_implementation."),
    "sparse_gradients": ("0.19.8", "Delete it: embeddings made with sparse=True need no key."),
    "zero_optimization.mics_hierarchical_params_gather": ("0.19.7", "Use zero_hpz_partition_size."),
    "zero_optimization.mics_shard_size": ("0.19.7", "Use zero_hpz_partition_size."),
    "zero_optimization.zeropp_loco_param": ("0.19.8", "Delete it: zero_quantized_gradients works without."),
}
# Keys of typed sections that transformers 5.23 and accelerate 1.15 read from the file without conversion.
READ_BY_OTHERS = ("stage", "enabled", "device", "stage3_gather_16bit_weights_on_model_save")
PLAIN = re.compile(r"-?\d+|true|false", re.IGNORECASE)  # what pydantic reads as a number or a switch
COMMENTS = ("_", "//", "#")
PERHAPS = 0.75  # similarity from which a key may be a misspelling of another
FEW = 5  # up to this many unknown keys are reported one by one
SURELY = 0.9  # similarity from which a key is certainly a misspelling
PLACES = {"max_grad_norm": "gradient_clipping"}  # keys with another name in DeepSpeed
# Old names that DeepSpeed no longer reads.
RENAMED = {"aio.thread_count": "intra_op_parallelism"}


@cache
def schema() -> dict[str, Any]:
    """The shipped schema."""
    return dict(json.loads(SCHEMA.read_text(encoding="utf-8")))


def shape_findings(value: Any, deepspeed: tuple[int, ...] | None = None, alone: bool = False) -> Iterator[Finding]:
    """Keys that DeepSpeed does not know, values of the wrong type or out of range, and renamed or removed keys.
    `deepspeed` is its release, if not the one that the schema was generated from; `alone`: only DeepSpeed reads the
    config."""
    from jsonschema import Draft202012Validator

    for fault in Draft202012Validator(schema()).iter_errors(value):
        path: KeyPath = tuple(fault.absolute_path)
        if fault.validator == "additionalProperties":
            others = [(*path, key) for key in fault.instance if key not in fault.schema["properties"]]
            found = [one for key in others for one in _unknown(key, fault.schema, fault.instance, deepspeed)]
            yield from _at_once(found)
        elif path == ("zero_optimization",) and isinstance(fault.instance, bool):
            stage = {"stage": int(fault.instance)}  # deepspeed, runtime/zero/config.py, read_zero_config_deprecated
            said = (
                f"zero_optimization is {_shown(fault.instance)}, an older form that the Trainer and accelerate cannot "
                f"read. Write what DeepSpeed reads it as, {json.dumps(stage)}."
            )
            yield Finding("DS105", "warning" if alone else "error", path, said, (Put(path, stage),))
        else:
            yield _wrong(path, fault.instance, fault.schema, alone)
    yield from _deprecated(value, schema(), ())
    yield from _twice(value)


def _unknown(
    path: KeyPath, section: dict[str, Any], given: dict[str, Any], deepspeed: tuple[int, ...] | None
) -> Iterator[Finding]:
    where, key = named(path), str(path[-1])
    if where in REMOVED:
        since, instead = REMOVED[where]
        if deepspeed is None or deepspeed >= release(since):
            yield Finding(
                "DS106", "error", path, f"{where} was removed in DeepSpeed {since}, which refuses it. {instead}"
            )
        return
    if key.startswith(COMMENTS):
        said = f"{where} is ignored: JSON has no comments, and DeepSpeed does not know such a key. You may delete it."
        yield Finding("DS101", "warning", path, said)
        return
    is_refused = len(path) > 1 and (section.get("x-typed") or path[:2] == ("scheduler", "params"))
    what = "refuses it once the model is built" if is_refused else "silently ignores it"
    names = [name for name, part in section["properties"].items() if not part.get("deprecated")]
    near = [RENAMED[where]] if where in RENAMED else difflib.get_close_matches(key, names, 1)
    likeness = difflib.SequenceMatcher(None, key, near[0]).ratio() if near else 0.0
    surely = where in RENAMED or (likeness >= SURELY and near[0] not in given and _fits(given[key], section, near[0]))
    may_be_a_slip = bool(near) and (is_refused or _fits(given[key], section, near[0]))
    elsewhere = [
        PLACES.get(key) or named(place) for place in _places_of(key, schema(), ()) if place not in (path, path[:-1])
    ]
    mends: tuple[Mend, ...] = ()
    if path[0] == "bf16" and key in schema()["properties"]["fp16"]["properties"]:
        mend = "It belongs to fp16; bf16 has no loss scale. Delete it."  # a mistake in several projects' stock configs
        mends = (Drop(path),)
    elif elsewhere and not surely:
        mend = f"Its place is {elsewhere[0]}."
    elif near and (where in RENAMED or likeness >= (PERHAPS if may_be_a_slip else SURELY)):
        mend = f'Did you mean "{near[0]}"?'
        mends = (Rename(path, near[0]),) if surely else ()
    else:
        mend = "Delete it."
    # A key that nothing reads does no harm, unless it was meant to set something other than DeepSpeed's default.
    is_idle = not is_refused and (mend == "Delete it." or _is_taken(where, given, section))
    said = f"{where or repr(key)} is not a key that DeepSpeed knows: it {what}. {mend}"
    yield Finding("DS101", "warning" if is_idle else "error", path, said, mends)


def _is_taken(where: str, given: dict[str, Any], section: dict[str, Any]) -> bool:
    """Whether an old name has the value that DeepSpeed uses anyway."""
    if where not in RENAMED:
        return False
    now = given.get(RENAMED[where], section["properties"][RENAMED[where]]["default"])
    return bool(given[where.split(".")[-1]] == now)


def _at_once(found: list[Finding]) -> Iterator[Finding]:
    """Many unknown keys, as of another program, become one warning."""
    idle = [finding for finding in found if finding.severity == "warning"]
    yield from (finding for finding in found if finding not in idle or len(idle) <= FEW)
    if len(idle) > FEW:
        names = ", ".join(named(finding.path) for finding in idle[:3])
        said = f"{names} and {len(idle) - 3} more are not keys that DeepSpeed knows: it silently ignores them."
        yield Finding("DS101", "warning", idle[0].path, f"{said} Delete them, unless another program reads them here.")


def _fits(value: Any, section: dict[str, Any], key: str) -> bool:
    from jsonschema import Draft202012Validator

    wanted = section["properties"][key]
    return Draft202012Validator(wanted).is_valid(value) or _number_in(value, wanted) is not None


def _places_of(key: str, part: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    """The paths in the schema that end in this key."""
    for name, inner in part.get("properties", {}).items():
        if name == key:
            yield (*path, name)
        yield from _places_of(key, inner, (*path, name))


def _wrong(path: KeyPath, found: Any, wanted: dict[str, Any], alone: bool) -> Finding:
    rule = _words(wanted)
    said = f"{named(path) or 'the file'} is {_shown(found)}, but it must be {rule}."
    number = _number_in(found, wanted)
    if number is not None:
        mend = f"Drop the quotes: {json.dumps(number)}."
        # pydantic converts these; the Trainer and accelerate do not, but read only few of DeepSpeed's keys.
        is_read = _is_typed(path[:-1]) and PLAIN.fullmatch(found.strip()) and (alone or path[-1] not in READ_BY_OTHERS)
        return Finding("DS104", "warning" if is_read else "error", path, f"{said} {mend}", (Put(path, number),))
    if (kindred := _kindred(found, wanted)) is not None:
        said = f"{said} It is read as {json.dumps(kindred)}: write that."
        return Finding("DS104", "warning", path, said, (Put(path, kindred),))
    kinds = wanted.get("type", [])
    a_number = isinstance(found, int | float) and not isinstance(found, bool)
    same_kind = "enum" in wanted or (a_number and bool({"integer", "number"} & {*_listed(kinds)}))
    of_numbers = "DS312" if path[1:2] == ("params",) else "DS103"  # an optimizer's or a schedule's may be intended
    return Finding(of_numbers if same_kind else "DS102", "error", path, said)


def _is_typed(path: KeyPath) -> bool:
    part = schema()
    for key in path:
        part = part.get("properties", {}).get(key, {})
    return bool(part.get("x-typed"))


def _kindred(found: Any, wanted: dict[str, Any]) -> Any:
    """True for 1 and 1 for true, which Python and pydantic treat as equal; None if neither is wanted."""
    from jsonschema import Draft202012Validator

    if type(found) not in (bool, int) or found not in (0, 1):
        return None
    other = int(found) if isinstance(found, bool) else bool(found)
    return other if Draft202012Validator(wanted).is_valid(other) else None


def _number_in(found: Any, wanted: dict[str, Any]) -> Any:
    """2 for "2" and True for "true", if the schema accepts the value inside the quotes; else None."""
    from jsonschema import Draft202012Validator

    if not isinstance(found, str):
        return None
    try:
        value = json.loads(found.strip().lower())
    except json.JSONDecodeError:
        return None
    if isinstance(value, str | list | dict | None) or value != value:
        return None
    return value if Draft202012Validator(wanted).is_valid(value) else None


def _words(wanted: dict[str, Any]) -> str:
    if "enum" in wanted:
        return _either([json.dumps(choice) for choice in wanted["enum"]])
    if "anyOf" in wanted:
        return _either([_words(part) for part in wanted["anyOf"]])
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": '"auto"' if "pattern" in wanted else "a string",
        "object": "an object, like {...}",
        "array": "a list",
        "null": "null",
    }
    kinds = wanted.get("type", [])
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = " and ".join(f"{words} {wanted[bound]}" for bound, words in bounds.items() if bound in wanted)
    first, *others = [names[kind] for kind in _listed(kinds)]
    return _either([f"{first} {limits}" if limits else first, *others])


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds


def _either(choices: list[str]) -> str:
    return " or ".join(part for part in (", ".join(choices[:-1]), choices[-1]) if part)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    text = text if len(text) < 60 else f"{text[:57]}..."
    return f"the string {text}" if isinstance(value, str) else text


def _deprecated(value: Any, part: dict[str, Any], path: KeyPath) -> Iterator[Finding]:
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        known = part.get("properties", {}).get(key)
        if known is None:
            continue
        here: KeyPath = (*path, key)
        if known.get("deprecated"):
            successor = known["x-successor"]
            mends = _succession(here, inner, successor)
            said = f"{named(here)} is an old name. Use {successor}."
            severity = "warning"
            # runtime/config_utils.py asserts that only one of them is present.
            if both := {successor, f"stage3_{successor}"} & value.keys():
                said = f"{named(here)} is the old name of {both.pop()}, and DeepSpeed refuses both together. Delete it."
                severity, mends = "error", (Drop(here),)
            yield Finding("DS105", severity, here, said, mends)
        yield from _deprecated(inner, known, here)


def _twice(value: Any) -> Iterator[Finding]:
    """Settings given under both of their names (deepspeed 0.19.8, runtime/zero/config.py, the fields with an alias)."""
    section = value.get("zero_optimization") if isinstance(value, dict) else None
    if not isinstance(section, dict):
        return
    for key in section:
        if f"stage3_{key}" in section and f"stage3_{key}" in schema()["properties"]["zero_optimization"]["properties"]:
            here = ("zero_optimization", key)
            said = f"{named(here)} and stage3_{key} are two names of one setting, and DeepSpeed refuses both together."
            yield Finding("DS105", "error", here, f"{said} Delete this one.", (Drop(here),))


def _succession(path: KeyPath, value: Any, successor: str) -> tuple[Mend, ...]:
    """The conversion that DeepSpeed makes for an old key (0.19.8, runtime/zero/config.py and precision_config.py)."""
    if " or " in successor:
        return ()
    if successor.startswith("offload_"):  # true stood for the CPU
        here = (*path[:-1], successor)
        return (Put(here, {"device": "cpu"}), Drop(path)) if value is True else (Drop(path),)
    # The Trainer looks for the longer of the two names that DeepSpeed accepts.
    long = f"stage3_{successor}"
    return (Rename(path, long if long in schema()["properties"]["zero_optimization"]["properties"] else successor),)
