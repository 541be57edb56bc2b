"""One flag: its name, kind, default, range, help, and how a command-line word or a YAML value is parsed."""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from finetune.run.meanings import nearest_choice


@dataclass(frozen=True)
class Range:
    """`least` and `most` are inclusive, `above` and `below` exclusive bounds. `others` are allowed numbers outside the
    range, with their meaning. With `share`, a number less than 1 is a fraction of all steps, and others are whole
    numbers. With `endless`, infinity is allowed."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    others: Mapping[float, str] = field(default_factory=dict)
    share: bool = False
    endless: bool = False

    def holds(self, value: float) -> bool:
        if value in self.others:
            return True
        if math.isinf(value) and not self.endless:
            return False
        within = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        return within and not (self.share and value > 1 and value % 1 != 0)  # the remainder is NaN for infinity

    def __str__(self) -> str:
        """The range as words that follow "it must be"."""
        words = [f"{self.least:g} or more"] if self.least is not None else []
        words += [f"more than {self.above:g}"] if self.above is not None else []
        words += [f"at most {self.most:g}"] if self.most is not None else []
        words += [f"less than {self.below:g}"] if self.below is not None else []
        whole = ["a whole number, or less than 1 for a fraction of all steps"] if self.share else []
        others = [f"or {value:g} {meaning}" for value, meaning in self.others.items()]
        return ", ".join([" and ".join(words), *whole, *others])


NOT_NEGATIVE, AT_LEAST_ONE, POSITIVE = Range(least=0), Range(least=1), Range(above=0)
PART = Range(above=0, below=1)  # a proper fraction: something remains on either side
RATE = Range(least=0, below=1)
TIMEOUT = Range(above=0, endless=True)
STEPS = Range(above=0, share=True)


# Values of a flag's `path`. All but "output" must exist, and are not deleted by
# --overwrite_output_dir.
FILE, FOLDER = "file", "folder"
SHIPPED_YAML = "yaml"  # a file, or the name of a shipped one; read by the parser
NAME_OR_PATH = "name or path"  # a hub id, a shipped name, or a path
METRIC = "metric"  # the name of a built-in metric, or a Python file
TEMPLATE = "template"  # the name of a shipped chat template, or a jinja file
OUTPUT = "output"  # created if missing
GIVEN = ("*",)  # for `Void`: any value that is set
MOST = 2**63  # a larger number is a typo
TRUE, FALSE = ("true", "yes", "y", "t", "1", "on"), ("false", "no", "n", "f", "0", "off")


@dataclass(frozen=True)
class Flag:
    """`kind` is "str", "int", "float", "bool" or "json" (an object, or a string). `many` flags take a list."""

    name: str
    kind: str
    default: Any
    help: str
    many: bool = False
    choices: tuple[str, ...] = ()
    path: str | None = None
    range: Range | None = None
    group: type | None = None  # the dataclass that it is a field of; None for the Trainer's flags
    pairs: bool = False  # takes words such as name=value, which a YAML may write as an object
    on_resume: str = ""  # a class from on_resume.py

    def read(self, given: Any) -> Any:
        """Parse words of a command line (a list of strings) or a YAML value. Raises ValueError that says what is
        wrong."""
        if isinstance(given, dict) and self.pairs:
            given = [f"{name}={value}" for name, value in given.items()]
        if isinstance(given, dict) and self.kind != "json":
            raise ValueError("must be a plain value, but this is an object")
        if self.many:
            return [self._one(item) for item in (given if isinstance(given, list) else [given])]
        if isinstance(given, list):
            if len(given) != 1:
                raise ValueError(f"expects one value, not {len(given)}: {' '.join(map(str, given))}")
            given = given[0]
        return self._one(given)

    def _one(self, given: Any) -> Any:
        if given is None or (self.default is None and self.kind in READERS and str(given).lower() == "none"):
            return None
        if self.kind == "json":
            return _object(given)
        if self.kind in READERS:
            return READERS[self.kind](given)
        text = str(given)
        if self.choices and text not in self.choices:
            if isinstance(given, bool) or text.lower() in (*TRUE, *FALSE):  # YAML 1.1 reads no and off as False
                meant = [word for word in self.choices if word in (TRUE if str(given).lower() in TRUE else FALSE)]
                if meant:
                    return meant[0]
            near = nearest_choice(text, self.choices)
            raise ValueError(f"must be one of {', '.join(self.choices)}" + (f"; you may mean {near}" if near else ""))
        return text


def _bool(given: Any) -> bool:
    text = str(given).lower()
    if text not in (*TRUE, *FALSE):
        raise ValueError("must be True or False")
    return text in TRUE


def _float(given: Any) -> float:
    try:
        found = math.nan if isinstance(given, bool) else float(given)
    except (ValueError, OverflowError):
        found = math.nan
    if math.isnan(found):
        raise ValueError("must be a number")
    return found  # may be infinity: a norm that is measured but not clipped


def _int(given: Any) -> int:
    try:
        found = int(str(given))
    except ValueError:
        found = _whole(given)
    if abs(found) >= MOST:
        raise ValueError("must be a whole number")
    return found


def _whole(given: Any) -> int:
    """Accepts forms such as 1e3, too."""
    try:
        number = _float(given)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError("must be a whole number")
    return int(number)


def _object(given: Any) -> Any:
    if not isinstance(given, str) or not given.lstrip().startswith("{"):
        return {key: _as_number(value) for key, value in given.items()} if isinstance(given, dict) else str(given)
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from error


def _as_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as a string."""
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        return float(value)
    return value


NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?e[+-]?\d+", re.IGNORECASE)
READERS: dict[str, Callable[[Any], Any]] = {"bool": _bool, "int": _int, "float": _float}


def flag(
    default: Any,
    help: str,
    on_resume: str,
    *,
    choices: Sequence[str] = (),
    path: str | None = None,
    range: Range | None = None,
    pairs: bool = False,
) -> Any:
    """A field of a dataclass of flags, with everything about the flag except its name and type."""
    metadata = {
        "help": help,
        "on_resume": on_resume,
        "choices": tuple(choices),
        "path": path,
        "range": range,
        "pairs": pairs,
    }
    return field(default=default, metadata=metadata)


def flags_of(groups: Sequence[type]) -> tuple[Flag, ...]:
    """The flags of dataclasses whose fields are made by `flag`."""
    found = []
    for group in groups:
        hints = typing.get_type_hints(group)
        for one in fields(group):
            kind, many = kind_of(hints[one.name])
            found.append(Flag(one.name, kind, one.default, many=many, group=group, **one.metadata))
    return tuple(found)


def kind_of(hint: Any) -> tuple[str, bool]:
    """The kind of a type such as `int | None`, or of a list's items; and whether it is a list."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    options = tuple(option for option in options if option is not type(None))
    if lists := [option for option in options if typing.get_origin(option) is list]:
        return kind_of(*typing.get_args(lists[0]))[0], True
    if any(option is dict or typing.get_origin(option) is dict for option in options):
        return "json", False
    simple = {int: "int", float: "float", bool: "bool"}
    return simple.get(options[0], "str") if len(options) == 1 else "str", False


@dataclass(frozen=True)
class Void:
    """`flags` do nothing if `by` has one of `values`, unless one of `unless` is on. If `by` is not given, they set it
    to `implies`; without `implies`, it is an error, and `mend` is the fix."""

    flags: tuple[str, ...]
    by: str
    values: tuple[Any, ...]
    mend: str = "Drop it."
    implies: Any = None
    unless: tuple[str, ...] = ()
    spares_defaults: bool = False  # default values are allowed, as in a YAML for other data
