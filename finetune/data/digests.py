"""Digests of files, and of prepared rows regardless of the files that store them. Slow ones are cached, keyed by the
files' sizes and modification times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset
from datasets.fingerprint import Hasher
from huggingface_hub.constants import HF_HUB_CACHE

from finetune.data.cache import cache_home, cache_key, file_state
from finetune.data.image_samples import Pictures
from finetune.data.mixture import Joined
from finetune.data.packing import PackedDataset

BLOCK_BYTES = 4 * 2**20
BATCH_ROWS = 100_000
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # in a model folder


def of_text(value: Any) -> str:
    """Digest of a JSON-like value."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def of_files(place: Path, whole: bool = True) -> str | None:
    """Digest of a file, or of all files in a folder with their names; None if it is neither. Unless `whole`, hashes
    only each file's size and its first and last `BLOCK_BYTES`: a stream may hold terabytes."""
    if not (place.is_file() or place.is_dir()):
        return None
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    root = None if place.is_file() else place
    return kept(files, lambda: _of_content(files, root)) if whole else _of_content(files, root, whole=False)


def of_base(model: str | None, revision: str | None, whole: bool) -> dict[str, str]:
    """Digest of the weights that a run starts from; empty when it starts from scratch. In a folder only weight files
    count, not reports or checkpoints. `whole` is as in `of_files`."""
    if not model:
        return {}
    folder = Path(model).expanduser()
    files = sorted(path for kind in WEIGHTS for path in folder.glob(kind) if path.is_file())
    if not files:
        return {"hub": f"{model}@{revision}"}
    return {"whole" if whole else "ends": kept(files, lambda: _of_content(files, folder, whole), str(whole))}


def of_weights(model: str | None, revision: str | None) -> dict[str, str]:
    """As `of_base` over all bytes. A hub model is identified by its commit, because a branch moves. transformers
    records the commit in the hub's cache (5.23, utils/hub.py, resolve_revision), not in the config."""
    commit = hub_revision(model, "models", revision or "main") if model else None
    return of_base(model, commit or revision, whole=True)


def same_base(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Compares only digests of the same kind: a hub name and a folder cannot be compared."""
    return bool(one) == bool(other) and all(one[kind] == other[kind] for kind in one.keys() & other.keys())


def hub_revision(name: str, kind: str = "datasets", revision: str = "main") -> str | None:
    """The commit of a hub data set, or of a model if `kind` is "models", in the local hub cache; None if not cached."""
    ref = Path(HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "refs" / revision
    return ref.read_text(encoding="utf-8").strip()[:64] if ref.is_file() else None


def of_rows(split: Any) -> str | None:
    """Digest of the training rows; None for a stream, and for data that this toolkit did not prepare."""
    if isinstance(split, Dataset):
        files = [Path(file["filename"]) for file in split.cache_files]
        return kept(files, lambda: _of_table(split), Hasher.hash(split))  # includes the selection of rows
    if isinstance(split, PackedDataset):
        tokens, blocks = split.tokens, split.blocks
        mapped = [array for array in (tokens.ids, tokens.learnt) if isinstance(array, np.memmap)]
        files = [Path(str(array.filename)) for array in mapped]
        whole = kept(files, lambda: _of_arrays((tokens.ids, tokens.learnt)), str([len(array) for array in mapped]))
        return of_text([whole, _of_arrays((tokens.starts, *vars(blocks).values())), split.document_mask])
    if isinstance(split, Joined):
        return of_text([[of_rows(part) for part in split.parts], [str(weight) for weight in split.weights or ()]])
    if isinstance(split, Pictures):
        return _of_arrays((split.pixels, split.labels))
    return None


def kept(files: Sequence[Path], make: Callable[[], str], part: str = "") -> str:
    """The result of `make`, a digest of `part` of the content of `files`; cached until a file changes size or time."""
    if not files:
        return make()
    place = cache_home() / "digests" / cache_key([file_state(str(path)) for path in files], part)
    try:
        found = place.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        found = ""
    if len(found) == 32:
        return found
    found = make()
    with suppress(OSError):  # an unwritable cache costs time but must not end the run
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(found, encoding="ascii")
    return found


def _of_content(files: Iterable[Path], root: Path | None, whole: bool = True) -> str:
    found = xxhash.xxh3_128()
    for path in files:
        if root is not None:
            found.update(f"{path.relative_to(root).as_posix()}\0".encode())
        with path.open("rb", buffering=0) as file:
            if not whole:
                size = path.stat().st_size
                found.update(f"{size}\0".encode() + file.read(BLOCK_BYTES))
                file.seek(max(size - BLOCK_BYTES, 0))
            while block := file.read(BLOCK_BYTES):
                found.update(block)
    return found.hexdigest()


def _of_arrays(arrays: Iterable[Any]) -> str:
    found = xxhash.xxh3_128()
    for array in arrays:
        if array is None:
            found.update(b"none")
            continue
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return found.hexdigest()


def _of_table(rows: Dataset) -> str:
    """By values alone: how a table is split into files and chunks does not matter."""
    found = xxhash.xxh3_128()
    for batch in rows.with_format("arrow").iter(BATCH_ROWS):
        for name in sorted(batch.column_names):
            found.update(f"{name}\0".encode())
            for part in _values(batch.column(name).combine_chunks()):
                found.update(part)
    return found.hexdigest()


def _values(column: Any) -> Iterator[bytes]:
    """For lists, first their lengths, then their items."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if pa.types.is_list(column.type):
        yield pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False).tobytes()
        yield from _values(column.flatten())
    elif pa.types.is_primitive(column.type):
        yield column.to_numpy(zero_copy_only=False).tobytes()
    else:
        yield from (json.dumps(value, default=str).encode() for value in column.to_pylist())
