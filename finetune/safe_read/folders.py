"""Checks a folder of a model or of data before a library opens it: the library may read only regular files of bounded
size inside the folder. Without --trust_remote_code, no model makes transformers or peft fetch or import code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.errors import RequestError
from finetune.safe_read.files import open_plain, read_bounded, refuse_outside, walk
from finetune.safe_read.values import leaves, parse_yaml, read_json_object

MOST_TOKENIZER_BYTES = 64 * 2**20  # the largest vocabularies take 35 MiB
MOST_TEMPLATE_BYTES = 2**20
# Files that transformers parses, each a JSON object; some hold large vocabularies.
JSON_OBJECTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "adapter_config.json",
)  # fmt: skip
CONFIGS = tuple(name for name in JSON_OBJECTS if name not in ("tokenizer.json", "added_tokens.json"))
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # the files that use_safetensors opens
# How a config asks for code from elsewhere (transformers 5.23). An implementation with a slash is a kernel on the hub
# (integrations/hub_kernels.py, is_kernel); some quantizers fetch kernels, and all but those in QUANTIZERS import
# packages that the config names (quantizers/auto.py); peft imports `megatron_core` and the parent of `auto_mapping`.
PLAIN_NAME = re.compile(r"[\w|.-]*")
QUANTIZERS = ("bitsandbytes",)
FETCHING = ("custom_generate", "custom_pipelines", "kernel_config", "kernel_mapping", "use_kernels",
            "megatron_config", "auto_mapping")  # fmt: skip
NAMES_FILES = ("transformers_weights", "fast_tokenizer_files")
DESCRIPTIONS = ("README.md", ".huggingface.yaml")  # datasets/config.py: REPOCARD_FILENAME, REPOYAML_FILENAME
FRONT = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---", re.DOTALL)
TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet", ".arrow", ".md", ".yaml")


def check_model_folder(folder: Path, said: str, trusts_code: bool = False) -> None:
    """Raises RequestError, beginning with `said` or a path. `trusts_code`: the folder's code may run, and fetch."""
    for path in sorted(folder.iterdir()):
        if path.name in JSON_OBJECTS:
            content = read_json_object(path, MOST_TOKENIZER_BYTES, folder)
            if path.name in CONFIGS and not trusts_code:
                refuse_code(content, path.name, said)
        elif path.name.endswith(".index.json"):
            _check_index(read_json_object(path, inside=folder), path.name, said)
        elif path.suffix == ".json":
            read_bounded(path, MOST_TOKENIZER_BYTES, folder)
        elif path.suffix == ".jinja":
            read_bounded(path, MOST_TEMPLATE_BYTES, folder)
        elif not path.is_dir():
            open_plain(path, folder).close()
    for path in sorted(folder.glob("additional_chat_templates/*")):
        read_bounded(path, MOST_TEMPLATE_BYTES, folder)


def check_data_folder(folder: Path, said: str) -> None:
    """Check that in a data folder with the hub's layout neither links nor the file patterns in its README.md lead out
    of it (datasets 5.2 follows both). Raises RequestError, beginning with `said` or a path."""
    for base, folders, names in walk(folder):
        for name in (*folders, *names):
            path = Path(base, name)
            if path.is_symlink():
                refuse_outside(path, folder)
            if name in names and name.endswith(TABLES):
                open_plain(path, folder).close()
    for name in DESCRIPTIONS:
        if os.path.lexists(path := folder / name):
            text = read_bounded(path, inside=folder)
            front = FRONT.match(text) if name.endswith(".md") else None
            content = parse_yaml(front[1] if front else "" if name.endswith(".md") else text, str(path))
            for place in map(str, leaves(content.get("configs") if isinstance(content, dict) else None)):
                if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts or "://" in place:
                    raise RequestError(f"{said}: {name} names {place[:80]!r}, which leads out of the folder.")


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors under the names that are loaded; a file of another name does not count."""
    return any((folder / name).is_file() for name in WEIGHTS)


def _check_index(content: dict[str, Any], name: str, said: str) -> None:
    places = content.get("weight_map")
    for place in places.values() if isinstance(places, dict) else ():
        if not isinstance(place, str) or Path(place).name != place:
            raise RequestError(f"{said}: {name} names {str(place)[:80]!r}, which is not a file beside it.")
        if not place.endswith(".safetensors") and not name.endswith(".bin.index.json"):
            raise RequestError(f"{said}: {name} names {place[:80]!r}, which is not a safetensors file.")


def refuse_code(content: dict[str, Any], name: str, said: str) -> None:
    """Raises RequestError if a config asks for code from elsewhere."""
    for key, value in _members(content):
        asks = key in FETCHING and bool(value)
        asks |= key.endswith("_implementation") and any(not _is_plain(one) for one in leaves(value))
        asks |= key == "quantization_config" and bool(value) and _method(value) not in QUANTIZERS
        asks |= key in NAMES_FILES and any(not _is_safe_file(one) for one in leaves(value))
        if asks:
            raise RequestError(
                f"{said}: {name} has {key} {str(value)[:80]!r}, which may fetch or import code. Delete it there, or "
                "add --trust_remote_code if you trust the author."
            )


def _method(value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    by_flag = value.get("load_in_4bit") or value.get("load_in_8bit")
    return QUANTIZERS[0] if by_flag else value.get("quant_method")


def _is_safe_file(value: Any) -> bool:
    return value is None or (isinstance(value, str) and Path(value).name == value and not value.endswith(".bin"))


def _is_plain(value: Any) -> bool:
    return value is None or (isinstance(value, str) and PLAIN_NAME.fullmatch(value) is not None)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of all objects at any depth."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _members(part)
    if isinstance(value, dict):
        yield from value.items()
