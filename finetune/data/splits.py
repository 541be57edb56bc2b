"""Opens and checks the splits that a run's flags ask for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset

from finetune.data.column_names import check_mapped, renames_in
from finetune.data.files import open_file, open_hub
from finetune.errors import RequestError
from finetune.run.flags.text import PreparationArguments

SHOWN = 5  # bad rows
HeldOut: TypeAlias = tuple[Any, Any, str]  # the numbers of the rows to train on and of those held out, and a note
ASKED_BY = {"train": "do_train", "validation": "do_eval", "test": "do_predict"}


def open_splits(
    arguments: Any,
    built_in: Callable[[], dict[str, Dataset]],
    source: str,
    opened: Callable[[str, str], Dataset] | None = None,
    splits: Sequence[str] = tuple(ASKED_BY),
) -> tuple[dict[str, Dataset], str]:
    """The raw `splits` given, and where they come from: the hub, or files, opened as tables or by `opened` (split, file
    name). If the flags name neither, those of `built_in`, which come from `source`. Raises RequestError."""
    if arguments.dataset_name:
        found = {name: open_hub(arguments.dataset_name, arguments.dataset_config_name, name) for name in splits}
        tables = {name: table for name, table in found.items() if table is not None}
        return tables, " ".join(filter(None, (arguments.dataset_name, arguments.dataset_config_name)))
    files = {name: file for name in ASKED_BY if (file := getattr(arguments, f"{name}_file", None))}
    if not files:
        return built_in(), source
    opened = opened or (lambda split, name: open_file(f"{split}_file", name, encoding=arguments.encoding))
    tables = {name: opened(name, file) for name, file in files.items() if name in splits}
    return tables, ", ".join(Path(file).name for file in files.values())


def renamed(arguments: Any, tables: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """The tables with the columns that --column_mapping names. Raises RequestError if no table has one of them."""
    words = arguments.column_mapping
    check_mapped(words, [table.column_names for table in tables.values()])
    return {
        split: table.rename_columns(renames_in(words, table.column_names, said_split(arguments, split)))
        for split, table in tables.items()
    }


def unused_fraction(cut: PreparationArguments) -> str:
    """A warning if --validation_fraction is set but the data already has a validation split; empty otherwise."""
    asked = cut.validation_fraction
    is_asked = asked != PreparationArguments.validation_fraction
    return f"--validation_fraction {asked:g} has no effect, because there is a validation split" if is_asked else ""


def hold_out_by(keys: Sequence[Any], fraction: float, seed: int, said: str, what: str) -> HeldOut:
    """A seeded part; rows with equal `keys` go to the same side. Raises RequestError, naming `said` and `what`, if
    there are too few distinct keys."""
    unique = sorted(set(keys))
    random.Random(seed).shuffle(unique)
    held = set(unique[: max(1, round(fraction * len(unique)))])
    if len(held) == len(unique):
        raise RequestError(f"{said}: has too few {what} to hold some out. Add --validation_file.")
    kept, held_out = ([i for i, key in enumerate(keys) if (key in held) is is_held] for is_held in (False, True))
    return kept, held_out, ""


def require_splits(there: Iterable[str], training: Any, kind: str) -> None:
    """Raises RequestError if a flag of `training` needs a split that the data lacks; `kind` ("file" or "dir") ends the
    name of the flag that would provide it."""
    names = list(there)
    for name, flag in ASKED_BY.items():
        if getattr(training, flag) and name not in names:
            raise RequestError(
                f"--{flag} needs a {name} split, but the data has: {', '.join(names)}. Give --{name}_{kind}, or "
                f"--{flag} False."
            )


def refuse_bad_rows(where: str, bad: Sequence[int], of: int, what: str, skip: bool, more: str = "") -> None:
    """Raises RequestError, naming `where`, for rows with the numbers `bad`, from 0, unless they are left out."""
    if len(bad) and not skip:
        shown = ", ".join(str(number + 1) for number in bad[:SHOWN]) + ", ..." * (len(bad) > SHOWN)
        raise RequestError(
            f"{where} has {len(bad):,} of {of:,} {what} (counted from 1, without a header: {shown}). "
            f"{mend_of_bad(len(bad), of)}{more}"
        )


def mend_of_bad(bad: int, of: int) -> str:
    """What to do about `bad` rows `of` so many: leaving out all of them is no way on."""
    return "Fix them." if bad == of else "Fix them, or leave them out with --skip_bad_rows True."


def said_split(arguments: Any, split: str) -> str:
    """How an error names a split: by its file, if it has one."""
    name = getattr(arguments, f"{split}_file")
    return f"--{split}_file {name}" if name else f"the {split} data"
