"""The sizes of a model's weights, read without torch from the headers of its safetensors files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from finetune.dsconfig.context import Weights
from finetune.errors import RequestError, first_line
from finetune.run.flags.groups import of_text
from finetune.safe_read import read_json_object
from finetune.safe_read.files import open_plain

INDEX, WHOLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"


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
    """Elements of each tensor. Opening a file reads its header, and checks it against the file's size."""
    open_plain(file, folder).close()
    try:
        with safe_open(file, framework="numpy") as opened:
            return [math.prod(opened.get_slice(name).get_shape()) for name in opened.keys()]  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{file}: is not a safetensors file, or is damaged or cut short ({first_line(error)}). Copy it again."
        ) from error


def _json(file: Path) -> dict[str, Any]:
    return read_json_object(file, inside=file.parent)
