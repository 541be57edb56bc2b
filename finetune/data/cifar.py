"""Reads CIFAR-10 as its authors distribute it (Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html): the
pickled python version, and the binary version.

Loading a pickle can run any code, so these are not loaded: the opcodes are listed, and their constants include the
pixels, which are the longest value, and the class ids, which are the numbers after the word "labels".
"""

from __future__ import annotations

import pickletools
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finetune.errors import RequestError, first_line, listed
from finetune.safe_read import read_bytes

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIDE * SIDE
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
LARGEST_BATCH_BYTES = 256 * 2**20  # the original batches have 30 MB
MOST_STEPS = 1_000_000  # opcodes read of a pickle; the original ones have some 30,000
INTEGERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")  # of pickletools
AGAIN = "Unpack the archive again."

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # pictures (N, 32, 32, 3) and class ids (N,)


def read_cifar(folder: Path) -> dict[str, Batch]:
    """The `train` and `test` pictures of an unpacked folder. Raises RequestError if it is not CIFAR-10."""
    if not folder.is_dir():
        mend = "Unpack it, and give the folder." if folder.is_file() else "Check the path."
        raise RequestError(f"--cifar_dir {folder}: there is no such folder. {mend}")
    for suffix, read in (("", read_pickle), (".bin", _read_binary)):
        if (folder / f"{TRAIN[0]}{suffix}").is_file():
            return {
                split: _joined([read(folder / f"{name}{suffix}") for name in names])
                for split, names in (("train", TRAIN), ("test", TEST))
            }
    there = listed(sorted(path.name for path in folder.iterdir()))
    raise RequestError(
        f"--cifar_dir {folder}: has neither data_batch_1 nor data_batch_1.bin; it holds {there}. Give the folder "
        "cifar-10-batches-py or cifar-10-batches-bin."
    )


def _joined(batches: list[Batch]) -> Batch:
    return np.concatenate([pixels for pixels, _ in batches]), np.concatenate([labels for _, labels in batches])


def _read_binary(path: Path) -> Batch:
    """Reads records of a class byte and 3,072 pixel bytes: 1,024 red, 1,024 green, 1,024 blue, row by row."""
    content = np.frombuffer(read_bytes(path, LARGEST_BATCH_BYTES), dtype=np.uint8)
    if not len(content) or len(content) % (PIXELS + 1):
        raise RequestError(
            f"{path}: is {len(content):,} bytes, but CIFAR-10's binary files are records of {PIXELS + 1:,}. Is it "
            "truncated? Unpack the archive again."
        )
    records = content.reshape(-1, PIXELS + 1)
    return _checked(path, records[:, 1:], records[:, 0].astype(np.int64))


def read_pickle(path: Path) -> Batch:
    """Reads one file of the python version without executing anything in it."""
    pixels, labels, follows, by_column, flag = b"", list[int](), False, False, False
    try:
        for op, value, _ in islice(pickletools.genops(read_bytes(path, LARGEST_BATCH_BYTES)), MOST_STEPS):
            if isinstance(value, str | bytes | bytearray) and op.name != "STRING":
                follows = value in ("labels", b"labels")  # Python 2 strings come as str, and Python 3 bytes may, too
                if len(value) > len(pixels):
                    pixels = value.encode("latin1") if isinstance(value, str) else bytes(value)
                    by_column = flag  # numpy writes the order flag right before the data
            elif op.name in ("NEWTRUE", "NEWFALSE") or isinstance(value, bool):
                flag = value is True or op.name == "NEWTRUE"
            elif follows and op.name in INTEGERS and value is not None:
                labels.append(value)
        ids = np.asarray(labels, dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"{path}: is not a CIFAR-10 batch in python form, or is truncated; it cannot be read as a pickle "
            f"({first_line(error)}). {AGAIN}"
        ) from error
    if not pixels or len(pixels) % PIXELS or by_column:
        raise RequestError(
            f"{path}: is not a CIFAR-10 batch, which holds b'data' (bytes, pictures x {PIXELS:,}, row by row) and "
            f"b'labels' (a list of integers). Its longest value has {len(pixels):,} bytes. {AGAIN}"
        )
    return _checked(path, np.frombuffer(pixels, np.uint8).reshape(-1, PIXELS), ids)


def _checked(path: Path, rows: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> Batch:
    if len(rows) != len(labels):
        raise RequestError(f"{path}: has {len(rows):,} pictures, but {len(labels):,} labels. {AGAIN}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(NAMES):
        wrong = sorted(set(labels.tolist()) - set(range(len(NAMES))))[:5]
        raise RequestError(f"{path}: has the labels {wrong}, but CIFAR-10's are 0 to {len(NAMES) - 1}.")
    return np.ascontiguousarray(rows.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)), labels
