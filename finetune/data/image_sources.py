"""Where pictures come from: folders of them, CIFAR-10's batches, hub data, and scikit-learn's handwritten digits."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from datasets import ClassLabel, Dataset
from PIL import Image, ImageOps, UnidentifiedImageError

from finetune.data import cifar
from finetune.data.columns import HIDDEN_LABEL, label_text
from finetune.data.files import open_hub
from finetune.data.tables import SPLITS
from finetune.errors import RequestError, first_line
from finetune.run.flags.images import ImageArguments

# Readers of Pillow that are asked. Others start programs (EPS: Ghostscript) or are seldom meant.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
DEEP_MODES = ("I", "F")  # how the names of modes with more than 8 bits begin (Pillow's documentation, Modes)
NAMES_OF_SPLITS = {"train", "training", "validation", "valid", "val", "test", "dev"}
OFFLINE = "Offline? Give a folder by --train_dir, CIFAR-10 by --cifar_dir, or leave all out for handwritten digits."


class BadImageError(RequestError):
    """A picture that cannot be read. The message says why."""


@dataclass(frozen=True)
class RawSplit:
    """Pictures as they came: `read` gives one in RGB or raises BadImageError, `name` says what to call it. `labels` are
    class names, None where nobody told."""

    size: int
    labels: Sequence[str] | None
    read: Callable[[int], Image.Image]
    name: Callable[[int], str]


@dataclass(frozen=True)
class RawImages:
    """The splits that are there, the classes in their order, and a line that says where they come from."""

    splits: dict[str, RawSplit]
    names: tuple[str, ...]
    source: str
    is_builtin: bool = False
    left_out: int = 0  # files that are no pictures, or lie in no class folder
    hidden: tuple[str, ...] = ()  # folders of pictures that are not looked at, for their names begin with a dot


def load_images(arguments: ImageArguments) -> RawImages:
    """Raises RequestError where there is nothing to read, or two places to read it from."""
    folders = {split: getattr(arguments, f"{split}_dir") for split in SPLITS}
    given = [f"--{split}_dir" for split, folder in folders.items() if folder][:1]
    given += [f"--{name}" for name in ("cifar_dir", "dataset_name") if getattr(arguments, name)]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are all given. Keep one: sources are not mixed.")
    if arguments.cifar_dir:
        return _from_cifar(Path(arguments.cifar_dir).expanduser())
    if arguments.dataset_name:
        return _from_hub(arguments)
    if given:
        return _from_folders({split: Path(folder).expanduser() for split, folder in folders.items() if folder})
    return _digits()


def open_picture(source: Path | bytes) -> Image.Image:
    """The picture in RGB, turned as its camera says, as transformers' pipelines open it. Raises BadImageError."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > (Image.MAX_IMAGE_PIXELS or float("inf")):
                raise BadImageError(f"has {width} x {height} pixels, too many to be meant. Make it smaller")
            if picture.mode.startswith(DEEP_MODES):
                raise BadImageError(f"has pixels of more than 8 bits (mode {picture.mode}). Convert it to 8 bits")
            picture.load()
            turned = ImageOps.exif_transpose(picture)
            return turned if turned.mode == "RGB" else turned.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error) as error:
        reason = "is no picture" if isinstance(error, UnidentifiedImageError) else first_line(error, 100)
        raise BadImageError(reason) from error
    except Image.DecompressionBombError as error:
        raise BadImageError("has too many pixels to be meant. Make it smaller") from error


def _digits() -> RawImages:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), given in sixteenths
    names = tuple(str(name) for name in found.target_names)
    split = _array_split(pixels, [names[i] for i in found.target], "digit")
    return RawImages({"train": split}, names, "built-in handwritten digits of scikit-learn", is_builtin=True)


def _from_cifar(folder: Path) -> RawImages:
    splits = {
        split: _array_split(pixels, [cifar.NAMES[i] for i in labels], f"{split} picture")
        for split, (pixels, labels) in cifar.read_cifar(folder).items()
    }
    return RawImages(splits, cifar.NAMES, f"CIFAR-10 in {folder.name}")


def _array_split(pixels: npt.NDArray[np.uint8], labels: Sequence[str], what: str) -> RawSplit:
    def read(index: int) -> Image.Image:
        return Image.fromarray(pixels[index]).convert("RGB")

    return RawSplit(len(pixels), labels, read, lambda index: f"{what} {index}")


def _from_folders(folders: dict[str, Path]) -> RawImages:
    splits, left_out, hidden = {}, 0, list[str]()
    names: tuple[str, ...] = ()
    for split, folder in folders.items():
        files, labels, others = _look_into(folder, split)
        hidden += _hidden_folders(folder)
        splits[split], left_out = _file_split(folder, files, labels), left_out + others
        if split == "train" or (not names and labels is not None):
            names = tuple(sorted(set(labels or ())))
    source = ", ".join(folder.name for folder in folders.values())
    return RawImages(splits, names, source, left_out=left_out, hidden=tuple(dict.fromkeys(hidden)))


def _look_into(folder: Path, split: str) -> tuple[list[str], list[str] | None, int]:
    """Pictures by their path in `folder`, the class of each, and how many files are something else."""
    flag = f"--{split}_dir {folder}"
    if not folder.is_dir():
        raise RequestError(f"{flag}: there is no such folder. Check the path.")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    loose = sorted(path.name for path in folder.iterdir() if path.is_file())
    if len(classes) > 1 and {name.lower() for name in classes} <= NAMES_OF_SPLITS:
        raise RequestError(
            f"{flag}: holds {', '.join(classes)}, which are splits and no classes. Give each by its own flag, "
            f"--train_dir {folder / classes[-1]} for instance."
        )
    pictures = [name for name in loose if name.lower().endswith(SUFFIXES)]
    if not classes and pictures and split == "test":
        return pictures, None, len(loose) - len(pictures)
    files, labels, others = [], [], len(loose)
    empty = []
    for name in classes:
        found = [Path(place, file) for place, _, some in os.walk(folder / name) for file in some]
        kept = sorted(str(path.relative_to(folder)) for path in found if path.name.lower().endswith(SUFFIXES))
        files += kept
        labels += [display(name)] * len(kept)
        others += len(found) - len(kept)
        empty += [] if kept else [display(name)]
    if not files:
        there = ", ".join(display(name) for name in (*classes, *loose)[:8]) or "nothing"
        raise RequestError(
            f"{flag}: has no sub-folder with pictures ({', '.join(SUFFIXES)}); it holds {there}. Put the pictures of "
            "each class into a sub-folder of its name."
        )
    if empty:
        raise RequestError(f"{flag}: has no picture in {', '.join(empty[:8])}. Fill them or remove them.")
    return files, labels, others


def _hidden_folders(folder: Path) -> list[str]:
    """Those that programs keep for themselves, and perhaps a class; only where they hold pictures."""
    return [
        display(path.name)
        for path in sorted(folder.iterdir())
        if path.name.startswith(".")
        and path.is_dir()
        and any(file.lower().endswith(SUFFIXES) for _, _, some in os.walk(path) for file in some)
    ]


def _file_split(folder: Path, files: list[str], labels: list[str] | None) -> RawSplit:
    return RawSplit(
        len(files), labels, lambda index: open_picture(folder / files[index]), lambda index: display(files[index])
    )


def display(name: str) -> str:
    """A file's name as text that can be written, whatever bytes the disk has for it."""
    return os.fsencode(name).decode("utf-8", errors="replace")


def _from_hub(arguments: ImageArguments) -> RawImages:
    name, config = str(arguments.dataset_name), arguments.dataset_config_name
    found = {split: open_hub(name, config, split, mend=OFFLINE) for split in SPLITS}
    tables = {split: table for split, table in found.items() if table is not None}
    if not tables:
        raise RequestError(f"--dataset_name {name}: has none of the splits {', '.join(SPLITS)}.")
    names: tuple[str, ...] = ()
    splits = {}
    for split, table in tables.items():
        image, label = _hub_columns(table, arguments, split)
        labels = None if label is None else _hub_labels(table, label, split)
        splits[split] = _table_split(table, image, labels, split)
        if label is not None and (split == "train" or not names):
            feature = table.features[label]
            names = tuple(feature.names) if isinstance(feature, ClassLabel) else tuple(sorted(set(labels or ())))
    return RawImages(splits, names, " ".join(filter(None, (name, config))))


def _hub_columns(table: Dataset, arguments: ImageArguments, split: str) -> tuple[str, str | None]:
    kinds = {column: type(feature) for column, feature in table.features.items()}
    shown = ", ".join(f"{column} ({kind.__name__})" for column, kind in kinds.items())
    images = [column for column, kind in kinds.items() if kind is datasets.Image]
    image = arguments.image_column_name or (images[0] if len(images) == 1 else None)
    if image is None or kinds.get(image) is not datasets.Image:
        raise RequestError(
            f"the {split} data has {len(images)} column(s) of pictures, and --image_column_name names "
            f"{arguments.image_column_name or 'none'}. Name one; it has: {shown}."
        )
    classes = [column for column, kind in kinds.items() if kind is ClassLabel]
    label = arguments.label_column_name or (classes[0] if len(classes) == 1 else "label" if "label" in kinds else None)
    if label not in kinds:
        if split == "test":
            return image, None
        raise RequestError(
            f"the {split} data has no column {label or 'of classes'}: name it by --label_column_name. It has: {shown}."
        )
    return image, label


def _hub_labels(table: Dataset, column: str, split: str) -> list[str] | None:
    feature, values = table.features[column], table[column][:]
    if split == "test" and all(value in (None, HIDDEN_LABEL) for value in values):
        return None
    wrong = [i for i, value in enumerate(values) if value is None or value == HIDDEN_LABEL]
    if wrong:
        raise RequestError(f"the {split} data has {len(wrong):,} rows without a label (from 0: {wrong[:5]}).")
    return [feature.names[value] if isinstance(feature, ClassLabel) else label_text(value) for value in values]


def _table_split(table: Dataset, column: str, labels: list[str] | None, split: str) -> RawSplit:
    stored = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def read(index: int) -> Image.Image:
        found: dict[str, Any] = stored[index][column] or {}
        if not found.get("bytes") and not found.get("path"):
            raise BadImageError("is empty")
        return open_picture(found["bytes"] or Path(found["path"]))

    return RawSplit(len(table), labels, read, lambda index: f"{split} row {index}")
