"""Checks the files of a checkpoint that a library would open as pickles.

A sharded checkpoint (torch.distributed.checkpoint) has a `.metadata`, a plain pickle that maps each tensor or value to
bytes of a `.distcp` file; torch opens the values that are not tensors as plain pickles, too
(torch/distributed/checkpoint/default_planner.py, load_bytes)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.safe_read.files import open_plain, read_bytes
from finetune.safe_read.pickles import LARGEST_PICKLE_BYTES, guarded, load_checked, load_plain, read_torch
from finetune.safe_read.stand_ins import SHARDED, Index, Info, RefusedError, Tensor, Whole

Place = tuple[str, int, int]  # a file beside the `.metadata`, the first byte, and the number of bytes


def check_sharded(path: Path) -> None:
    """Raises RefusedError for a `.metadata` that asks for classes other than torch's own records, points outside its
    folder, or points to a value that would run code."""
    whole = load_plain(read_bytes(path, LARGEST_PICKLE_BYTES), SHARDED)
    if type(whole) is not Whole:
        raise RefusedError("is not the metadata of a sharded checkpoint")
    try:
        values = dict.fromkeys(_values(path.parent, vars(whole)))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RefusedError(f"has an invalid list of places ({type(error).__name__}: {error})") from error
    if (total := sum(length for _, _, length in values)) > LARGEST_PICKLE_BYTES:
        raise RefusedError(f"has values of {total:,} bytes; at most {LARGEST_PICKLE_BYTES:,} are read")
    for name, offset, length in values:
        with open_plain(path.with_name(name)) as file:
            file.seek(offset)
            content = file.read(length)
        try:
            read_torch(io.BytesIO(content), None)
        except RefusedError as error:
            raise RefusedError(f"points to a value in {name} that {error}") from error


def _values(folder: Path, state: dict[str, Any]) -> Iterator[Place]:
    """The places of all stored values that are not tensors; torch itself reads tensors with `weights_only=True`."""
    tensors = {name for name, kind in state["state_dict_metadata"].items() if type(kind) is Tensor}
    sizes: dict[str, int] = {}
    for index, info in state["storage_data"].items():
        if type(index) is not Index or type(info) is not Info:
            raise TypeError("other records")
        name, offset, length = (vars(info)[key] for key in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
            raise RefusedError(f"names a file outside its folder ({str(name)[:80]!r})")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise RefusedError(f"names bytes of {name} that cannot exist")
        if vars(info).get("transform_descriptors"):
            raise RefusedError(f"says that {name} is compressed, which these recipes do not write")
        if name not in sizes:
            if not (file := folder / name).is_file():
                raise RefusedError(f"names {name}, which is not in its folder")
            sizes[name] = file.stat().st_size
        if offset + length > sizes[name]:
            raise RefusedError(f"names {length:,} bytes at {offset:,} of {name}, which is shorter")
        if vars(index).get("fqn") not in tensors:
            yield name, offset, length


WRITTEN_ONLY = ("training_args.bin", "adapter_args.bin")  # written by the Trainer and never read back
PICKLED = (".pt", ".pth", ".bin", ".metadata")  # opened as pickles by libraries that resume, load or export


def refuse_unsafe(path: Path) -> None:
    """Check one file of a checkpoint before a library opens it. Raises RequestError if opening it could run code, or if
    it cannot be opened. `.distcp` files are checked with their `.metadata`."""
    if path.name in WRITTEN_ONLY or not path.name.endswith(PICKLED):
        return
    if path.name.endswith(".metadata"):
        guarded(path, lambda: check_sharded(path))
    else:
        load_checked(path)
