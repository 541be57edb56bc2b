"""Checks a checkpoint before any of it is opened: is it as it was saved, and could opening it run code?"""

from __future__ import annotations

from pathlib import Path

from finetune.errors import RequestError
from finetune.safe_read.checkpoint_files import refuse_unsafe
from finetune.training.checkpoints.manifest import MANIFEST, altered, files_of, problems, read_manifest, shares
from finetune.training.checkpoints.tag import refuse_other_tags
from finetune.training.checkpoints.writing import by_first, every, rank, ranks, together


def verify_together(folder: Path) -> list[str]:
    """What is wrong with it. Each rank reads its share of the bytes, and all get all findings. All ranks must call it.
    Raises RequestError on all of them if it holds a file that is never opened, whoever made it."""
    sizes, found = by_first(lambda: _names_and_sizes(folder))
    if found:
        return found
    share = shares(sizes, ranks())[rank()]

    def look() -> list[str]:
        found = []
        if (folder / MANIFEST).exists():  # without one, the user named it and has been warned
            found = altered(folder, read_manifest(folder), [name for name in share if name != MANIFEST])
        if not found:  # a damaged checkpoint is not opened anyway, and does not suggest an attack
            for name in share:
                refuse_unsafe(folder / name)
        return found

    found = [problem for part in every(together(look)) for problem in part]
    if not found:
        by_first(lambda: refuse_other_tags(folder))
    return found


def _names_and_sizes(folder: Path) -> tuple[dict[str, int], list[str]]:
    """The sizes of all files, and what is wrong. Links are refused: one may lead elsewhere a moment later."""
    if (folder / MANIFEST).exists() and (found := problems(folder, hashes=False)):
        return {}, found
    sizes, strange = files_of(folder)
    if strange:
        raise RequestError(
            f"{folder / strange[0]}: is a link or not a regular file, and a checkpoint may only contain regular "
            f"files. If it consists of links, as in the hub's cache, make a copy: cp -rL {folder} COPY."
        )
    return sizes, []
