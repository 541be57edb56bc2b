"""Keyword arguments as command-line words: the command line's parser reads, checks and explains all flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from finetune.errors import RequestError
from finetune.run.choose import recipes
from finetune.run.parse import COMMAND_LINE


@contextmanager
def from_python() -> Iterator[None]:
    """Request errors name an argument as the source of a value, instead of the command line."""
    try:
        yield
    except RequestError as error:
        error.args = (str(error).replace(f"({COMMAND_LINE})", "(an argument)"),)
        raise


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """{"train_file": ["a.csv", "b.csv"], "bf16": False, "model_size": None} as `--train_file a.csv b.csv --bf16 False`:
    None means not given."""
    return [word for name, value in flags.items() if value is not None for word in _said(name, value)]


def _said(name: str, value: Any) -> list[str]:
    """`--name value`; a value that looks like a flag is joined with =."""
    values = _values(name, value)
    alone = len(values) == 1 and values[0].startswith("--")
    return [f"--{name}={values[0]}"] if alone else [f"--{name}", *values]


def _values(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        takes_pairs = any(name in recipe.flags and recipe.flags[name].pairs for recipe in recipes().values())
        return [f"{key}={one}" for key, one in value.items()] if takes_pairs else [json.dumps(value)]
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
