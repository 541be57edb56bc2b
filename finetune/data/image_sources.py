"""Loads pictures from class folders, CIFAR-10's batches, the hub, or scikit-learn's handwritten digits."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import ClassLabel, Dataset
from PIL import Image, ImageOps, UnidentifiedImageError

from finetune.data import cifar
from finetune.data.columns import HIDDEN_LABEL, label_text, said_columns
from finetune.data.files import open_hub
from finetune.data.tables import SPLITS
from finetune.errors import RequestError, first_line, listed, plain
from finetune.run.flags.images import ImageArguments
from finetune.safe_read import is_plain_file
from finetune.safe_read.files import walk

# The Pillow readers allowed. Others start programs (EPS: Ghostscript) or are rarely intended.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
DEEP_MODES = ("I", "F")  # Pillow modes with more than 8 bits begin with these (Pillow's documentation, Modes)
NAMES_OF_SPLITS = {"train", "training", "validation", "valid", "val", "test", "dev"}
OFFLINE = "Offline? Give a folder with --train_dir, CIFAR-10 with --cifar_dir, or no data for handwritten digits."


class BadImageError(RequestError):
    """A picture that cannot be read. The message says why."""


@dataclass(frozen=True)
class RawSplit:
    """Raw pictures, and for each that is used a name and its class name, or None if unlabeled."""

    pictures: Sequence[Any]
    names: Sequence[str]
    labels: Sequence[str] | None
    places: Sequence[int] | None = None  # of the pictures that are used; None: all

    def __len__(self) -> int:
        return len(self.names)

    def select(self, rows: Sequence[int]) -> RawSplit:
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        places = rows if self.places is None else [self.places[row] for row in rows]
        return RawSplit(self.pictures, [self.names[row] for row in rows], labels, places)

    def read(self, row: int) -> Image.Image:
        """In RGB. Raises BadImageError."""
        return open_picture(self.pictures[row if self.places is None else int(self.places[row])])


@dataclass(frozen=True)
class RawImages:
    """The splits given, the class names in order, and a line that says where they come from."""

    splits: dict[str, RawSplit]
    names: tuple[str, ...]
    source: str
    is_builtin: bool = False
    notes: tuple[str, ...] = ()  # on files that are not used, or on the columns that are read


def load_images(arguments: ImageArguments) -> RawImages:
    """Raises RequestError if there is nothing to read."""
    folders = {split: Path(name).expanduser() for split in SPLITS if (name := getattr(arguments, f"{split}_dir"))}
    if arguments.cifar_dir:
        return _from_cifar(Path(arguments.cifar_dir).expanduser())
    if arguments.dataset_name:
        return _from_hub(arguments)
    return _from_folders(folders) if folders else _digits()


def open_picture(source: Any) -> Image.Image:
    """Opens a path, a row that `datasets.Image` has not decoded, or an array of pixels, as RGB, rotated according to
    EXIF. Raises BadImageError.

    `datasets.Image` (5.2) is not used: it tries all of Pillow's readers, whatever the file's suffix (Ghostscript, too),
    keeps 16-bit pixels, fetches paths that are URLs, and accepts twice MAX_IMAGE_PIXELS.
    """
    if isinstance(source, np.ndarray):
        return Image.fromarray(source).convert("RGB")
    found: dict[str, Any] = {"path": source} if isinstance(source, str | Path) else source or {}
    if not found.get("bytes") and not found.get("path"):
        raise BadImageError("is empty")
    if not found.get("bytes") and not is_plain_file(Path(found["path"])):
        raise BadImageError("is not a regular file")  # opening a pipe would block
    try:
        with Image.open(
            io.BytesIO(found["bytes"]) if found.get("bytes") else found["path"], formats=FORMATS
        ) as picture:
            width, height = picture.size
            if width * height > (Image.MAX_IMAGE_PIXELS or float("inf")):
                raise BadImageError(f"has {width} x {height} pixels, too many. Make it smaller")
            if picture.mode.startswith(DEEP_MODES):
                raise BadImageError(f"has pixels of more than 8 bits (mode {picture.mode}). Convert it to 8 bits")
            picture.load()
            ImageOps.exif_transpose(picture, in_place=True)  # a copy would take longer than decoding
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error) as error:
        reason = "is not a picture" if isinstance(error, UnidentifiedImageError) else first_line(error, 100)
        raise BadImageError(reason) from error
    except Image.DecompressionBombError as error:
        raise BadImageError("has too many pixels. Make it smaller") from error


def _digits() -> RawImages:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), values from 0 to 16
    names = tuple(str(name) for name in found.target_names)
    split = RawSplit(pixels, _numbered("digit", pixels), [names[i] for i in found.target])
    return RawImages({"train": split}, names, "built-in handwritten digits of scikit-learn", is_builtin=True)


def _from_cifar(folder: Path) -> RawImages:
    splits = {
        split: RawSplit(pixels, _numbered(f"{split} picture", pixels), [cifar.NAMES[i] for i in labels])
        for split, (pixels, labels) in cifar.read_cifar(folder).items()
    }
    return RawImages(splits, cifar.NAMES, f"CIFAR-10 in {folder.name}")


def _numbered(what: str, rows: Sized) -> list[str]:
    return [f"{what} {row}" for row in range(len(rows))]


def _from_folders(folders: dict[str, Path]) -> RawImages:
    """The imagefolder of `datasets` (5.2) is not used: it takes the last folder of a path as class, finds no classes if
    depths differ, and trusts any metadata.csv. It takes a second per thousand files, and this 10 ms."""
    splits, left_out, hidden = {}, 0, dict[str, None]()
    names: tuple[str, ...] = ()
    for split, folder in folders.items():
        splits[split], others, out_of_sight = _look_into(folder, split)
        left_out, hidden = left_out + others, hidden | dict.fromkeys(out_of_sight)
        if split == "train" or (not names and splits[split].labels is not None):
            names = tuple(sorted(set(splits[split].labels or ())))
    source = ", ".join(folder.name for folder in folders.values())
    notes = [f"{left_out:,} other files not used"] * bool(left_out)
    notes += [f"hidden folders left out: {listed([*map(plain, hidden)])}"] * bool(hidden)
    return RawImages(splits, names, source, notes=tuple(notes))


def _look_into(folder: Path, split: str) -> tuple[RawSplit, int, list[str]]:
    """The pictures, the number of other files, and the hidden (dot) folders with pictures."""
    flag = f"--{split}_dir {folder}"
    if not folder.is_dir():
        raise RequestError(f"{flag}: there is no such folder. Check the path.")
    loose = sorted(path.name for path in folder.iterdir() if path.is_file())
    every = {
        path.name: [os.path.join(place, file) for place, _, files in walk(path) for file in files]
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }
    kept = {name: sorted(file for file in files if _is_picture(file)) for name, files in every.items()}
    hidden = [display(name) for name in kept if name.startswith(".") and kept[name]]
    classes = {name: files for name, files in kept.items() if not name.startswith(".")}
    if len(classes) > 1 and {name.lower() for name in classes} <= NAMES_OF_SPLITS:
        raise RequestError(
            f"{flag}: holds {', '.join(classes)}, which are splits, not classes. Give each with its own flag, "
            f"such as --train_dir {folder / list(classes)[-1]}."
        )
    if not classes and split == "test" and (bare := [name for name in loose if _is_picture(name)]):
        loose_split = RawSplit([str(folder / name) for name in bare], [display(name) for name in bare], None)
        return loose_split, len(loose) - len(bare), hidden
    pictures = [file for files in classes.values() for file in files]
    if not pictures:
        there = listed([display(name) for name in (*classes, *loose)])
        raise RequestError(
            f"{flag}: has no subfolder with pictures ({', '.join(SUFFIXES)}); it holds {there}. Put the pictures of "
            "each class into a subfolder with its name."
        )
    if empty := [display(name) for name, files in classes.items() if not files]:
        raise RequestError(f"{flag}: has no picture in {listed(empty)}. Fill them or remove them.")
    labels = [display(name) for name, files in classes.items() for _ in files]
    others = len(loose) + sum(len(every[name]) for name in classes) - len(pictures)
    return RawSplit(pictures, [display(os.path.relpath(file, folder)) for file in pictures], labels), others, hidden


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def display(name: str) -> str:
    """A file name as printable text; undecodable bytes are replaced."""
    return os.fsencode(name).decode("utf-8", errors="replace")


def _from_hub(arguments: ImageArguments) -> RawImages:
    name, config = str(arguments.dataset_name), arguments.dataset_config_name
    found = {split: open_hub(name, config, split, mend=OFFLINE) for split in SPLITS}
    tables = {split: table for split, table in found.items() if table is not None}
    if not tables:
        raise RequestError(f"--dataset_name {name}: has none of the splits {', '.join(SPLITS)}.")
    names: tuple[str, ...] = ()
    columns, splits = "", {}
    for split, table in tables.items():
        image, label = _hub_columns(table, arguments, split)
        others = [one for one in table.column_names if one not in (image, label)]
        columns = columns or said_columns({"picture": [image], "label": [label] if label else []}, others)
        labels = None if label is None else _hub_labels(table, label, split)
        stored = table.cast_column(image, datasets.Image(decode=False))[image]  # rows are read on demand
        splits[split] = RawSplit(stored, _numbered(f"{split} row", table), labels)
        if label is not None and (split == "train" or not names):
            feature = table.features[label]
            names = tuple(feature.names) if isinstance(feature, ClassLabel) else tuple(sorted(set(labels or ())))
    return RawImages(splits, names, " ".join(filter(None, (name, config))), notes=(columns,))


def _hub_columns(table: Dataset, arguments: ImageArguments, split: str) -> tuple[str, str | None]:
    kinds = {column: type(feature) for column, feature in table.features.items()}
    shown = ", ".join(f"{column} ({kind.__name__})" for column, kind in kinds.items())
    images = [column for column, kind in kinds.items() if kind is datasets.Image]
    image = arguments.image_column_name or (images[0] if len(images) == 1 else None)
    if image is None or kinds.get(image) is not datasets.Image:
        raise RequestError(
            f"the {split} data has {len(images)} picture column(s), and --image_column_name names "
            f"{arguments.image_column_name or 'none'}. Name one; it has: {shown}."
        )
    classes = [column for column, kind in kinds.items() if kind is ClassLabel]
    label = arguments.label_column_name or (classes[0] if len(classes) == 1 else "label" if "label" in kinds else None)
    if label not in kinds:
        if split == "test":
            return image, None
        raise RequestError(
            f"the {split} data has no column {label or 'of classes'}. Set --label_column_name. It has: {shown}."
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
