"""The `.metadata` of a sharded checkpoint (torch.distributed.checkpoint): a plain pickle that says which bytes of which
`.distcp` file are which tensor or value. Read here by an unpickler that finds stand-ins alone, and calls nothing."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import first_line

METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Place:
    """Bytes of a file that lies beside the `.metadata`. `is_pickle` is False for a tensor, which torch itself reads
    with `weights_only=True`."""

    file: str
    offset: int
    length: int
    is_pickle: bool


def read_metadata_pickle(content: bytes) -> list[Place]:
    """Where the checkpoint's parts are. Raises pickle.UnpicklingError for a pickle that asks for other classes than
    torch's own records, or that leads out of its folder."""
    try:
        whole = _Unpickler(io.BytesIO(content)).load()
        if type(whole) is not _Whole:
            raise pickle.UnpicklingError("is no record of a sharded checkpoint")
        return _places(whole.state)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # whatever a file made to break it can raise
        raise pickle.UnpicklingError(f"cannot be read ({type(error).__name__}: {first_line(error)})") from error


class _Record:
    """One of torch's records, with whatever state; what it holds has been looked at by itself."""

    state: dict[str, Any]

    def __new__(cls, *given: Any) -> Any:
        if given:
            raise pickle.UnpicklingError("makes a record with arguments, as torch does not")
        made = object.__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state if type(state) is dict else {}


class _Whole(_Record): ...


class _Bytes(_Record): ...


class _Index(_Record): ...


class _Info(_Record): ...


class _Tensor(_Record): ...


class _Word:
    """A value that only says a word: a memory format, a layout, a path."""

    def __new__(cls, *given: Any) -> Any:
        if not all(type(one) in (str, int) for one in given):
            raise pickle.UnpicklingError("gives a word that is none")
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("fills a word")


class _Size:
    """torch.Size: a tuple of integers."""

    def __new__(cls, *given: Any) -> Any:
        sides = given[0] if len(given) == 1 else None
        if not isinstance(sides, tuple | list) or not all(type(side) is int for side in sides):
            raise pickle.UnpicklingError("gives a shape that is none")
        return tuple(sides)


KNOWN: dict[tuple[str, str], Any] = {
    (METADATA, "Metadata"): _Whole,
    (METADATA, "BytesStorageMetadata"): _Bytes,
    (METADATA, "MetadataIndex"): _Index,
    (METADATA, "TensorStorageMetadata"): _Tensor,
    (METADATA, "TensorProperties"): _Record,
    (METADATA, "ChunkStorageMetadata"): _Record,
    (METADATA, "StorageMeta"): _Record,
    (METADATA, "_MEM_FORMAT_ENCODING"): _Word,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch.serialization", "_get_layout"): _Word,
    ("torch", "Size"): _Size,
    ("pathlib", "PosixPath"): _Word,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := KNOWN.get((module, name))) is not None:
            return found
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("asks for something outside itself")


def _places(state: dict[str, Any]) -> list[Place]:
    kinds, stored = state["state_dict_metadata"], state["storage_data"]
    tensors = {name for name, kind in kinds.items() if type(kind) is _Tensor}
    found = []
    for index, info in stored.items():
        if type(index) is not _Index or type(info) is not _Info:
            raise pickle.UnpicklingError("has a list of places that is none")
        name, offset, length = (info.state[key] for key in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
            raise pickle.UnpicklingError(f"names a file outside its folder ({str(name)[:80]!r})")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise pickle.UnpicklingError(f"names bytes of {name} that cannot be")
        if info.state.get("transform_descriptors"):
            raise pickle.UnpicklingError(f"says that {name} is packed, which these recipes do not write")
        found.append(Place(name, offset, length, is_pickle=index.state.get("fqn") not in tensors))
    return found
