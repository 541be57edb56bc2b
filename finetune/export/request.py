"""What is wrong with the arguments of `finetune export`, before torch is imported."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from finetune.errors import RequestError
from finetune.run.files import ADAPTER_CONFIG
from finetune.training.checkpoints.manifest import MANIFEST

SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?([KMGT])(i?)B", re.IGNORECASE)
POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def check_request(asked: argparse.Namespace) -> None:
    """Raises RequestError; the checkpoint's content is looked at later."""
    folder = Path(asked.checkpoint).expanduser()
    bytes_of(asked.max_shard_size)
    check_folder(folder)
    if asked.merge_adapter and not (folder / ADAPTER_CONFIG).is_file():
        raise RequestError(f"--merge_adapter: {folder} holds a whole model, not an adapter. Leave it out.")
    if asked.base_model and not asked.merge_adapter:
        raise RequestError("--base_model is for --merge_adapter. Add it, or drop --base_model.")
    check_target(Path(asked.out).expanduser())


def check_folder(folder: Path) -> None:
    """Raises RequestError unless `folder` may hold a checkpoint or a finished run."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: not a folder. Give a checkpoint, such as runs/seq_cls/checkpoint-100, or a run.")


def check_target(place: Path) -> None:
    """Raises RequestError if `place` holds something, or is inside a checkpoint."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RequestError(f"{place}: already exists, and is not overwritten. Give a new or empty folder.")
    if inside := next((above for above in place.absolute().parents if (above / MANIFEST).is_file()), None):
        raise RequestError(
            f"{place}: is inside the checkpoint {inside.name}, which may only contain the files in its manifest. Give "
            "another folder."
        )


def bytes_of(size: str) -> int:
    """ "5GB", "200 MiB"."""
    match = SIZE.fullmatch(size.strip())
    if not match:
        raise RequestError(f"--max_shard_size is {size!r}, but it must be a size such as 5GB or 500MiB.")
    found = int(float(match[1]) * (1024 if match[3] else 1000) ** POWERS[match[2].upper()])
    if found < 1:
        raise RequestError(f"--max_shard_size is {size!r}, but it must be at least one byte.")
    return found
