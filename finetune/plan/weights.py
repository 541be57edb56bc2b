"""The sizes of a model's weights, read without torch from the headers of its safetensors files."""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import Any

from finetune.dsconfig.context import Weights
from finetune.errors import RequestError
from finetune.run.flags.groups import of_text
from finetune.safe_read import parse_json, read_json_object
from finetune.safe_read.files import open_plain

INDEX, WHOLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
DTYPE = re.compile(r"[A-Z]+(\d+)(?:_\w+)?")  # F32, BF16, F8_E4M3, F4: the number is that of bits
MOST_HEADER_BYTES = 2**25  # safetensors' own limit is 100 MB; a hundred thousand tensors have 15


def weights_of(folder: Path) -> Weights:
    """The sizes of the weights in a Hugging Face model folder. Raises RequestError if there are none."""
    if (folder / INDEX).is_file():
        named = _json(folder / INDEX).get("weight_map")
        names = set(map(str, named.values())) if isinstance(named, dict) else set()
        if outside := [name for name in names if Path(name).name != name]:
            raise RequestError(f"{folder / INDEX}: names {outside[0][:80]!r}, which is not a file beside it.")
        files = sorted(folder / name for name in names)
    else:
        files = [folder / WHOLE]
    if not files or not all(file.is_file() for file in files):
        raise RequestError(
            f"--model {folder}: there is no {WHOLE} or {INDEX} with its files. Give the folder of a Hugging Face model."
        )
    sizes = [size for file in files for size in _sizes(file, folder)]
    if not sizes:
        raise RequestError(f"--model {folder}: its files hold no weights.")
    config = _json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    read = of_text(config.get)
    hidden = next((read(key) for key in ("hidden_size", "n_embd", "dim", "d_model") if read(key) is not None), None)
    return Weights(sum(sizes), max(sizes), hidden if isinstance(hidden, int) else None)


def _sizes(file: Path, folder: Path) -> list[int]:
    """Elements of each tensor. A safetensors file starts with the length of its header, in 8 bytes, and the header."""
    try:
        with open_plain(file, folder) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MOST_HEADER_BYTES:
                raise ValueError("its header is too long")
            if length > os.fstat(stream.fileno()).st_size:
                raise ValueError("its header is longer than the file")
            header = parse_json(stream.read(length).decode("utf-8"), str(file))
            room = os.fstat(stream.fileno()).st_size - stream.tell()
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        return [_elements(name, tensor, room) for name, tensor in tensors.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise RequestError(f"{file}: is not a safetensors file ({error}).") from error


def _elements(name: str, tensor: dict[str, Any], room: int) -> int:
    """Elements of one tensor. Raises ValueError if its shape, its bytes and those of the file (`room`) do not agree."""
    shape, (begin, end) = tensor["shape"], tensor["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError("a shape is not a list of sizes")
    elements: int = math.prod(shape)
    named = DTYPE.fullmatch(tensor["dtype"])
    bits = int(named[1]) if named else 8  # BOOL
    if not 0 <= begin <= end or elements * bits != (end - begin) * 8:
        raise ValueError(f"{name[:80]}: its shape does not match its bytes in the header")
    if end > room:
        raise ValueError(f"{name[:80]} ends {end:,} bytes into the data, but the file has {room:,}: it is truncated")
    return elements


def _json(file: Path) -> dict[str, Any]:
    return read_json_object(file, inside=file.parent)
