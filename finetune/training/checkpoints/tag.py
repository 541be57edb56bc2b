"""DeepSpeed's folder in a checkpoint, and the pointer file that names it. DeepSpeed joins whatever the file says to the
checkpoint's path, and opens what it finds as plain pickles (deepspeed 0.19.8, runtime/engine.py, load_checkpoint)."""

from __future__ import annotations

import re
from pathlib import Path

from finetune.errors import RequestError
from finetune.safe_read import read_bounded

TAG = re.compile(r"global_step[0-9]{1,18}")
UNIVERSAL_TAG = re.compile(r"global_step[0-9]{1,18}_universal")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"  # files
LONGEST_NAME_BYTES = 200


def named_tag(folder: Path, pointer: str = LATEST) -> Path | None:
    """The folder that `pointer` names, if any. Raises RequestError if it is not a folder of this checkpoint."""
    path = folder / pointer
    if not path.is_file():
        return None
    named = read_bounded(path, LONGEST_NAME_BYTES, inside=folder).strip()
    if not named:
        return None
    if not TAG.fullmatch(named) and not (pointer == LATEST_UNIVERSAL and UNIVERSAL_TAG.fullmatch(named)):
        raise RequestError(f"{path}: names {named[:60]!r}, which is not a global_stepN folder of this checkpoint.")
    tag = folder / named
    if tag.is_symlink() or not tag.is_dir():
        raise RequestError(f"{path}: names {named}, which is not a folder: the checkpoint is incomplete or altered.")
    return tag


def newest_tag(folder: Path) -> Path | None:
    """The folder with the highest step number, or None."""
    found = [path for path in folder.iterdir() if TAG.fullmatch(path.name) and path.is_dir()]
    return max(found, key=lambda path: int(path.name.removeprefix("global_step")), default=None)


def refuse_other_tags(folder: Path) -> None:
    """Raises RequestError if a pointer leads out of the checkpoint, or to nothing."""
    for pointer in (LATEST, LATEST_UNIVERSAL):
        named_tag(folder, pointer)
