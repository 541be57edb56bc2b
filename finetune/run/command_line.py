"""The parser of `finetune` and its commands, and of recipes that do not train."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from finetune.errors import RequestError

CHOICE = re.compile(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.*)\)")  # argparse's wording


class CommandParser(argparse.ArgumentParser):
    """Suggests the nearest flag for an unknown one, as the recipes do; subcommands' parsers are of this class too."""

    words: Sequence[str] = ()  # the words that it was given

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
        """The first word that looks like a flag but is not the beginning of any flag of this parser."""
        for word in self.words:
            name = word.removeprefix("--").partition("=")[0]
            if word.startswith("--") and not any(known.startswith(name) for known in self._names()):
                return word
        return None

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
