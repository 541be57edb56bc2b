"""Short names for what data hold: of files, and of prepared rows whatever files they lie in. What takes long is kept in
the cache, by the files' sizes and times."""

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
    """Of plain values."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def of_files(place: Path, whole: bool = True) -> str | None:
    """Of a file, or of all files of a folder with their names in it; None where it is neither. Unless `whole`, of each
    its size and its first and last `BLOCK_BYTES`: a stream may be of terabytes."""
    if not (place.is_file() or place.is_dir()):
        return None
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    root = None if place.is_file() else place
    return kept(files, lambda: _of_content(files, root)) if whole else _of_content(files, root, whole=False)


def of_base(model: str | None, revision: str | None, whole: bool) -> dict[str, str]:
    """The weights that a run begins from, of a folder without what else lies there, reports and checkpoints; nothing
    from scratch. Unless `whole`, as of a stream's files."""
    if not model:
        return {}
    folder = Path(model).expanduser()
    files = sorted(path for kind in WEIGHTS for path in folder.glob(kind) if path.is_file())
    if not files:
        return {"hub": f"{model}@{revision}"}
    return {"whole" if whole else "ends": kept(files, lambda: _of_content(files, folder, whole), str(whole))}


def of_weights(model: str | None, revision: str | None) -> dict[str, str]:
    """As `of_base` of all bytes, and of a model of the hub, whose config was read, by its commit: a branch moves on.
    transformers notes the commit in the hub's cache (5.23, utils/hub.py, resolve_revision), and on no config."""
    commit = hub_revision(model, "models", revision or "main") if model else None
    return of_base(model, commit or revision, whole=True)


def same_base(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """A name of the hub and a folder cannot be compared."""
    return bool(one) == bool(other) and all(one[kind] == other[kind] for kind in one.keys() & other.keys())


def hub_revision(name: str, kind: str = "datasets", revision: str = "main") -> str | None:
    """The commit of a data set of the hub, or of one of its "models", that the hub's cache holds; None where it holds
    none."""
    ref = Path(HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "refs" / revision
    return ref.read_text(encoding="utf-8").strip()[:64] if ref.is_file() else None


def of_rows(split: Any) -> str | None:
    """Of the rows that are trained on; None for a stream, and for what we did not prepare."""
    if isinstance(split, Dataset):
        files = [Path(file["filename"]) for file in split.cache_files]
        return kept(files, lambda: _of_table(split), Hasher.hash(split))  # which knows the selection of the rows
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
    """What `make` gives, which depends on the content of `files` and on which `part` of it is asked for; from the cache
    where they are as they were then."""
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
    with suppress(OSError):  # a cache that cannot be written costs time, and no run
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
    """By values alone: how a table is cut into files and chunks is nobody's business."""
    found = xxhash.xxh3_128()
    for batch in rows.with_format("arrow").iter(BATCH_ROWS):
        for name in sorted(batch.column_names):
            found.update(f"{name}\0".encode())
            for part in _values(batch.column(name).combine_chunks()):
                found.update(part)
    return found.hexdigest()


def _values(column: Any) -> Iterator[bytes]:
    """Of lists first their lengths, then what is in them."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if pa.types.is_list(column.type):
        yield pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False).tobytes()
        yield from _values(column.flatten())
    elif pa.types.is_primitive(column.type):
        yield column.to_numpy(zero_copy_only=False).tobytes()
    else:
        yield from (json.dumps(value, default=str).encode() for value in column.to_pylist())
