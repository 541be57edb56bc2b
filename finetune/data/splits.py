"""The splits that a run asks for by its flags."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from finetune.data.files import open_hub
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments

ASKED_BY = {"train": "do_train", "validation": "do_eval", "test": "do_predict"}


def open_splits(
    arguments: Any, opened: Callable[[str, str], Dataset], splits: Sequence[str] = tuple(ASKED_BY)
) -> tuple[dict[str, Dataset], str] | None:
    """The raw splits that are there, and where they come from: of the hub, or each file as `opened` gives it by its
    split and name. None where neither is named. Raises RequestError."""
    if arguments.dataset_name:
        found = {name: open_hub(arguments.dataset_name, arguments.dataset_config_name, name) for name in splits}
        tables = {name: table for name, table in found.items() if table is not None}
        return tables, " ".join(filter(None, (arguments.dataset_name, arguments.dataset_config_name)))
    files = {name: getattr(arguments, f"{name}_file") for name in splits}
    given = {name: file for name, file in files.items() if file}
    tables = {name: opened(name, file) for name, file in given.items()}
    return (tables, ", ".join(Path(file).name for file in given.values())) if given else None


def unused_fraction(cut: PreparationArguments) -> str:
    """What to say of --validation_fraction where the data has a validation split already; nothing of the default."""
    asked = cut.validation_fraction
    is_asked = asked != PreparationArguments.validation_fraction
    return f"--validation_fraction {asked:g} does nothing, for there is a validation split" if is_asked else ""


def hold_out_by(
    train: Dataset, keys: Sequence[Any], fraction: float, seed: int, said: str, what: str
) -> dict[str, Dataset]:
    """A seeded part of what rows have in common as `validation`: rows with equal `keys` stand on one side alone. Raises
    RequestError where there is too little of it, in `said` by the name of `what`."""
    unique = sorted(set(keys))
    random.Random(seed).shuffle(unique)
    held = set(unique[: max(1, round(fraction * len(unique)))])
    if len(held) == len(unique):
        raise RequestError(f"{said}: has too few {what} to hold some out. Add --validation_file.")
    rows = {
        "train": [i for i, key in enumerate(keys) if key not in held],
        "validation": [i for i, key in enumerate(keys) if key in held],
    }
    return {split: train.select(kept) for split, kept in rows.items()}


def require_splits(there: Iterable[str], training: Any, kind: str) -> None:
    """Raises RequestError where a flag of `training` asks for a split that the data lacks; `kind` ends the flag that
    would give it, "file" or "dir"."""
    names = list(there)
    for name, flag in ASKED_BY.items():
        if getattr(training, flag) and name not in names:
            raise RequestError(
                f"--{flag} needs a {name} split, but the data has: {', '.join(names)}. Give --{name}_{kind}, or "
                f"--{flag} False."
            )


def said_split(arguments: Any, split: str) -> str:
    """How an error names a split: by its file, if it has one."""
    name = getattr(arguments, f"{split}_file")
    return f"--{split}_file {name}" if name else f"the {split} data"
