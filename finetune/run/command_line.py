"""The parser of `finetune` and its commands, and of recipes that do not train; and a recipe's --help."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from finetune.errors import RequestError
from finetune.run.flag import Flag
from finetune.run.recipe import Recipe

CHOICE = re.compile(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.*)\)")  # argparse's wording


class CommandParser(argparse.ArgumentParser):
    """Suggests the nearest flag for an unknown one, as the recipes do, and takes no abbreviations; subcommands' parsers
    are of this class too."""

    words: Sequence[str] = ()  # the words that it was given

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **words})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.words = sys.argv[1:] if args is None else args
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = next((one for one in unknown if one.startswith("-")), unknown[0])
            if not word.startswith("-"):
                raise RequestError(f"{word}: this is one argument too many for `{self.prog}`. `--help` lists them.")
            raise RequestError(self._unknown(word))
        return known, unknown

    def _unknown(self, word: str) -> str:
        from finetune.run.meanings import meant

        mend = meant(word.partition("=")[0], self._names()).replace("`--help`", f"`{self.prog} --help`")
        return f"unknown flag {word} for `{self.prog}`.{mend}"

    def _names(self) -> list[str]:
        return [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]

    def _typo(self) -> str | None:
        """The first word that looks like a flag but is none of this parser's."""
        named = (word for word in takewhile(lambda word: word != "--", self.words) if word.startswith("--"))
        return next((word for word in named if word[2:].partition("=")[0] not in self._names()), None)

    def error(self, message: str) -> NoReturn:
        """Rephrase argparse's message in the recipes' wording. If an argument is missing, a typo may be why."""
        if "arguments are required" in message and (typo := self._typo()):
            raise RequestError(f"{self._unknown(typo)} And {message}.")
        if found := CHOICE.fullmatch(message):
            from finetune.run.meanings import nearest_choice

            what, word, words = found.groups()
            choices = [one.strip("'") for one in words.split(", ")]
            near = nearest_choice(word, choices)
            mend = f"; you may mean {near}" if near else ""
            what = what if what.startswith("-") else f"the command of `{self.prog}`"
            raise RequestError(f"{what} is {word!r}, but it must be one of {', '.join(choices)}{mend}.")
        for kind, words in (("int", "a whole number"), ("float", "a number")):
            said = rf"argument (\S+): invalid {kind} value: (.*)"
            message = re.sub(said, rf"\1 is \2, but it must be {words}", message)
        raise RequestError(f"{message}. `{self.prog} --help` shows the usage.")


COMMON = (
    *("output_dir", "config", "model_name_or_path", "model_size", "train_file", "validation_file", "test_file"),
    *("train_dir", "dataset_name", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("max_steps", "learning_rate", "bf16", "deepspeed", "pipeline_parallel_size", "resume", "report_to", "seed"),
)
CLOSING = """A list takes several words (--report_to wandb tensorboard), and --flag alone means True.
--config takes a YAML of the same flags; the command line overrides it."""
BY_MACHINE = ("bf16", "fp16")  # chosen automatically by default
INDENT, COLUMN = "  ", 34


def help_of(recipe: Recipe, about: str | None) -> str:
    """The help text; `about` is the docstring of the recipe's file."""
    flags = dict(recipe.flags)
    common = [flags.pop(name) for name in COMMON if name in flags]
    parts = [(about or recipe.script).strip(), _section("Common flags", recipe, common)]
    for group in (*recipe.groups, *recipe.trainer_groups, *recipe.pipeline_groups):
        own = [flags.pop(flag.name) for flag in recipe.own_flags if flag.group is group and flag.name in flags]
        title = (group.__doc__ or group.__name__).strip().splitlines()[0]
        parts += [_section(title, recipe, own)] if own else []
    parts.append(_section("Trainer flags (transformers.TrainingArguments)", recipe, list(flags.values())))
    parts.append(CLOSING)
    return "\n\n".join(parts)


def _section(title: str, recipe: Recipe, flags: list[Flag]) -> str:
    return "\n".join([f"{title.rstrip('.')}:", *(_entry(flag, recipe) for flag in flags)])


def _entry(flag: Flag, recipe: Recipe) -> str:
    default = recipe.default(flag.name)
    words = "" if flag.kind == "bool" else f" {flag.kind.upper()}" + (" ..." if flag.many else "")
    choices = f" [{', '.join(flag.choices)}]" if flag.choices and flag.choices[0] not in flag.help else ""
    shown = "" if default is None or default in ("", []) or flag.name in BY_MACHINE else f" (default: {default})"
    if flag.kind == "bool" and default is True and flag.default is True:
        shown = f" (default: True; --no_{flag.name} for False)"
    if flag.name in recipe.scratch_defaults:
        shown = f" (default: {default}; for a model from scratch {recipe.scratch_defaults[flag.name]})"
    head = f"{INDENT}--{flag.name}{words}"
    width = max(60, min(120, shutil.get_terminal_size().columns))
    body = textwrap.wrap(f"{flag.help}{choices}{shown}", width - COLUMN) or [""]
    first = f"{head:<{COLUMN}}{body[0]}" if len(head) < COLUMN else f"{head}\n{' ' * COLUMN}{body[0]}"
    return "\n".join([first, *(f"{' ' * COLUMN}{line}" for line in body[1:])])
