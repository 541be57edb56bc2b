"""CIFAR-10 as its authors hand it out (Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html): the python
version, which is pickles, and the binary one.

A pickle may run any code when it is loaded. These are read by an Unpickler that knows what a dict of lists, bytes and
numpy arrays needs, and refuses everything else before it is called.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.errors import RequestError, first_line

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIDE * SIDE
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
# What a cut or random file makes of the pickle machine (Python's documentation of pickle.UnpicklingError).
BROKEN = (pickle.UnpicklingError, ValueError, TypeError, EOFError, LookupError, AttributeError, ImportError,
          MemoryError, OverflowError)  # fmt: skip
AGAIN = "Unpack the archive again."

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # pictures (N, 32, 32, 3) and class ids (N,)


def read_cifar(folder: Path) -> dict[str, Batch]:
    """The `train` and `test` pictures of an unpacked folder. Raises RequestError for anything that is not CIFAR-10."""
    if not folder.is_dir():
        mend = "Unpack it, and give the folder." if folder.is_file() else "Check the path."
        raise RequestError(f"--cifar_dir {folder}: there is no such folder. {mend}")
    for suffix, read in (("", _read_pickle), (".bin", _read_binary)):
        if (folder / f"{TRAIN[0]}{suffix}").is_file():
            return {
                split: _joined([read(folder / f"{name}{suffix}") for name in names])
                for split, names in (("train", TRAIN), ("test", TEST))
            }
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise RequestError(
        f"--cifar_dir {folder}: has neither data_batch_1 nor data_batch_1.bin; it holds {there}. Give the folder "
        "cifar-10-batches-py or cifar-10-batches-bin."
    )


def _joined(batches: list[Batch]) -> Batch:
    return np.concatenate([pixels for pixels, _ in batches]), np.concatenate([labels for _, labels in batches])


def _read_binary(path: Path) -> Batch:
    """Records of a byte for the class and 3,072 for the pixels: 1,024 red, 1,024 green, 1,024 blue, row by row."""
    content = np.frombuffer(_bytes_of(path), dtype=np.uint8)
    if not len(content) or len(content) % (PIXELS + 1):
        raise RequestError(
            f"{path}: is {len(content):,} bytes, but CIFAR-10's binary files are records of {PIXELS + 1:,}. Was it cut "
            "off? Unpack the archive again."
        )
    records = content.reshape(-1, PIXELS + 1)
    return _checked(path, records[:, 1:], records[:, 0].astype(np.int64))


def _read_pickle(path: Path) -> Batch:
    content = load_plain_pickle(path)
    data = content.get(b"data") if isinstance(content, dict) else None
    labels = content.get(b"labels") if isinstance(content, dict) else None
    is_array = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == PIXELS
    if not is_array or not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise RequestError(
            f"{path}: is no batch of CIFAR-10, which holds b'data' (bytes, pictures x {PIXELS:,}) and b'labels' "
            f"(a list of integers). It holds {str(found)[:200]}. {AGAIN}"
        )
    assert data is not None
    return _checked(path, data, np.asarray(labels, dtype=np.int64))


def _checked(path: Path, rows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> Batch:
    if len(rows) != len(labels):
        raise RequestError(f"{path}: has {len(rows):,} pictures, but {len(labels):,} labels. {AGAIN}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(NAMES):
        wrong = sorted(set(labels.tolist()) - set(range(len(NAMES))))[:5]
        raise RequestError(f"{path}: has the labels {wrong}, but CIFAR-10's are 0 to {len(NAMES) - 1}.")
    return np.ascontiguousarray(rows.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)), labels


def load_plain_pickle(path: Path) -> Any:
    """What a pickle holds, if it is made of plain Python values and, as values of a dict, numpy arrays of numbers.
    Python 2's text comes as bytes. Raises RequestError, without having called anything, for a pickle that asks for
    more."""
    try:
        found = _PlainUnpickler(io.BytesIO(_bytes_of(path)), encoding="bytes").load()
        if not isinstance(found, dict):
            return found
        return {name: value.values if isinstance(value, _Array) else value for name, value in found.items()}
    except _RefusedError as error:
        raise RequestError(f"{path}: {first_line(error, 400)}") from error
    except BROKEN as error:
        raise RequestError(
            f"{path}: is no batch of CIFAR-10 in python form, or was cut off; it cannot be read as a pickle "
            f"({first_line(error)}). {AGAIN}"
        ) from error


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}). CIFAR-10 has all of its batches.") from error


class _RefusedError(pickle.UnpicklingError):
    """For a pickle that asks for more than a batch needs. The message says what."""


class _Refusing:
    """What stands for a name in a pickle. The pickle machine sets attributes on what has no __setstate__ of its own."""

    def __setstate__(self, state: Any) -> None:
        raise _RefusedError("the pickle fills something that no batch does. It is not read.")


class _Latin1(_Refusing):
    """`_codecs.encode(text, "latin1")`, as Python 3 writes bytes into an older protocol's pickle."""

    def __new__(cls, text: Any, encoding: Any = None) -> Any:
        if encoding not in ("latin1", b"latin1") or not isinstance(text, str):
            raise _RefusedError(f"the pickle encodes text as {encoding!r}, which no batch does. It is not read.")
        return text.encode("latin1")


class _Kind(_Refusing):
    """`numpy.dtype`, by name and byte order alone: numpy itself believes whatever a pickle says of flags and fields."""

    def __init__(self, name: Any, *_: Any) -> None:
        kind = np.dtype(name.decode("latin1") if isinstance(name, bytes) else str(name))
        if kind.kind not in "biuf":
            raise _RefusedError(f"the pickle holds an array of {kind}, which is no number. It is not read.")
        self.kind = kind

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else str(state[1])
        if order in ("<", ">"):
            self.kind = np.dtype(order + self.kind.str[1:])


class _ArrayClass(_Refusing):
    """`numpy.ndarray`, which is only named, never called."""


class _Array(_Refusing):
    """What numpy's `_reconstruct` makes, and the pickle then fills; `values` is the array."""

    def __init__(self, *_: Any) -> None:
        self.values: npt.NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        flat = np.frombuffer(content, dtype=kind.kind)
        self.values = flat.reshape([int(side) for side in shape], order="F" if is_fortran else "C")


KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _ArrayClass,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _Latin1,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := KNOWN.get((module, name))) is not None:
            return found
        raise _RefusedError(
            f"the pickle asks for {module}.{name}, which no batch of CIFAR-10 needs: loading it could run code. "
            "It is not read. Get the files from their source."
        )
