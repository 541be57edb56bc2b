"""Parses the words of a command line and the lines of a YAML into values by flag, each with its source. All mistakes
are reported at once."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import RequestError
from finetune.run.flag import Flag
from finetune.run.flat_yaml import read_flat_yaml_lines
from finetune.run.meanings import MEANINGS, meant

COMMAND_LINE = "command line"
DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"  # including those that text editors insert
ALSO_PATHS = ("resume",)  # besides its keywords
IN_BASE64 = ("deepspeed", "deepspeed_config")  # may hold a trial of DeepSpeed's autotuning (engine.py, TRIAL)
RECIPE_KEY = "recipe"  # in a YAML: the recipe that it is for


@dataclass(frozen=True)
class Setting:
    """A value and its source: "command line", "FILE.yaml line 7", or what made it a default."""

    value: Any
    source: str
    is_given: bool = True


def settings_of(
    argv: Sequence[str], flags: Mapping[str, Flag], refused: Mapping[str, str], recipe: str, reads: Sequence[str] = ()
) -> tuple[dict[str, Setting], list[str]]:
    """The given values by flag, and all mistakes in them; the command line overrides the YAML of its --config.
    `refused` maps flags of other recipes to a message; `recipe` is the name of this one, which also takes the YAMLs of
    those in `reads`. Raises RequestError if that YAML cannot be read, together with all other mistakes."""
    mistakes: list[str] = []
    words = words_by_flag(argv, flags, mistakes)
    said = {name: (given, COMMAND_LINE) for name, given in words.items()}
    unread = None
    path = words.get("config")
    if path and not unusable(path[-1]):
        try:
            said = _lines(path[-1], (recipe, *reads), mistakes) | said
        except RequestError as error:
            unread = str(error)
    # Scripts with deepspeed.add_config_arguments have --deepspeed as a switch, and a separate flag for the file.
    if "deepspeed_config" in said and said.get("deepspeed", ("",))[0] in ([], True, ["True"], ["true"]):
        del said["deepspeed"]
    found = {}
    for name, (given, source) in said.items():
        where = f"--{name} ({source})"
        if name in flags:
            try:
                found[name] = Setting(_value(flags[name], given, source), source)
            except ValueError as error:
                shown = " ".join(given) if isinstance(given, list) and source == COMMAND_LINE else given
                mistakes.append(f"--{name} is {shown!r} ({source}), but it {error}.")
        elif name not in refused:
            mistakes.append(f"{where}: recipes/{recipe}.py has no such flag.{meant(name, flags)}")
        elif given or source == COMMAND_LINE:  # a YAML's `streaming: false` is harmless
            mistakes.append(f"{where}: {refused[name]}")
    if unread is not None:
        raise RequestError("\n".join([unread, *mistakes]))
    return found, mistakes


def words_by_flag(argv: Sequence[str], flags: Mapping[str, Flag], mistakes: list[str]) -> dict[str, list[str]]:
    """The words after each flag. A flag given twice must have the same words. Drops the deepspeed launcher's
    --local_rank (transformers 5 has no such flag). `--no_FLAG` means False for a flag that is True by default."""
    said: list[tuple[str, list[str]]] = []
    values: list[str] | None = None
    for word in argv:
        bare = word.lstrip(DASHES).partition("=")[0]
        is_like = word[:1] in DASHES and not word.startswith("--") and bare[:1].isalpha()
        if word == "--" or (is_like and (values is None or {spelt(bare)} & {*flags, *MEANINGS})):
            what = (
                f"a flag begins with two dashes.{meant(bare, flags)}"
                if bare
                else "it is not followed by a flag. Drop it."
            )
            mistakes.append(f"{word} ({COMMAND_LINE}): {what}")
            values = []
            continue
        if not word.startswith("--"):
            if values is None:
                mistakes.append(f"unexpected argument {word}: a value follows its flag, as in --flag {word}.")
            else:
                values.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name, values = spelt(name), [value] if equals else []
        positive = flags.get(name.removeprefix("no_"))
        if name not in flags and positive is not None and positive.default is True:
            name, values = positive.name, ["False"]
        said.append((name, values))
    found: dict[str, list[str]] = {}
    for name, words in said:
        if name != "local_rank" and found.setdefault(name, words) != words:
            both = f"{' '.join(found[name])!r} and {' '.join(words)!r}"
            mistakes.append(f"--{name} is {both} (both on the command line). Keep one.")
    return found


def _lines(path: str, recipes: Sequence[str], mistakes: list[str]) -> dict[str, tuple[Any, str]]:
    """The YAML's values, each with its line. A line without a value is ignored."""
    found: dict[str, tuple[Any, str]] = {}
    for key, value, line in read_flat_yaml_lines(path):
        name, where = spelt(key), f"{path} line {line}"
        if name in found:
            mistakes.append(f"--{name} ({where}) is given twice, first in {found[name][1]}. Keep one.")
        elif value is not None:
            found[name] = value, where
    if "config" in found:
        mistakes.append(f"--config ({found.pop('config')[1]}): a YAML cannot include another one. Copy its lines here.")
    asked, _ = found.pop(RECIPE_KEY, (None, ""))
    if asked not in (None, *recipes):
        mistakes.append(f"--config {path} (command line) is for recipes/{asked}.py, not for recipes/{recipes[0]}.py.")
    return found


def spelt(name: str) -> str:
    """The name as flags spell it: `max-steps` is `max_steps`."""
    return name.replace("-", "_")


def _value(flag: Flag, given: Any, source: str) -> Any:
    if isinstance(given, list) and not flag.many and source != COMMAND_LINE:
        raise ValueError("must be one value, not a list")
    if flag.path or flag.name in ALSO_PATHS:
        for word in _texts(given):
            is_json = flag.kind == "json" and word.lstrip().startswith("{")
            if not is_json and (why := unusable(word, may_be_long=flag.name in IN_BASE64)):
                raise ValueError(why)
    if given == []:
        if flag.kind != "bool":
            raise ValueError("needs a value")
        return True
    return flag.read(given)


def _texts(given: Any) -> list[str]:
    """The words of a command line, or the strings in a line of a YAML."""
    return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)]


MOST_BYTES, MOST_BYTES_OF_A_PART = 4095, 255  # linux/limits.h, PATH_MAX with its NUL, NAME_MAX

# Control characters, line ends, and bytes that are not UTF-8 (which no record of a run can hold); and characters that
# change the writing direction, so that a name reads as another. Spaces and joiners of any script occur in real names.
UNSEEN = ("Cc", "Zl", "Zp", "Cs")
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def unusable(name: str, may_be_long: bool = False) -> str | None:
    """Why it cannot be the name of a file or folder, as the end of "but it ..."; None if it can."""
    if not name.strip():
        return "is blank, maybe from an empty shell variable. Give a name"
    strange = next((letter for letter in name if unicodedata.category(letter) in UNSEEN or letter in TURNS), None)
    if strange:
        return f"has the character {strange!r}, which a path of a run cannot have. Rename it"
    if name.startswith("~") and os.path.expanduser(name) == name:
        return "begins with ~, and there is no such user here. Write the folder out"
    encoded = b"" if may_be_long else os.fsencode(name)
    if len(encoded) > MOST_BYTES or any(len(part) > MOST_BYTES_OF_A_PART for part in encoded.split(b"/")):
        return f"is longer than a file system allows ({MOST_BYTES_OF_A_PART} bytes between slashes). Shorten it"
    return None
