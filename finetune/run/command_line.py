"""The parser of `finetune` and its commands, and of recipes that train nothing."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from finetune.errors import RequestError

CHOICE = re.compile(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.*)\)")  # as argparse says it


class CommandParser(argparse.ArgumentParser):
    """Names the nearest flag, as the recipes do; its subcommands' parsers are of this class too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = next((one for one in unknown if one.startswith("-")), unknown[0])
            if not word.startswith("-"):
                raise RequestError(f"{word}: that is one argument too many for `{self.prog}`. `--help` lists them.")
            names = [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]
            from finetune.run.meanings import meant

            mend = meant(word.partition("=")[0], names).replace("`--help`", f"`{self.prog} --help`")
            raise RequestError(f"unknown flag {word} for `{self.prog}`.{mend}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """What argparse says of a value, in the recipes' words."""
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
        raise RequestError(f"{message}. `{self.prog} --help` says how it is called.")
