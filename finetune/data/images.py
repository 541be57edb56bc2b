"""Image classification: pictures of one size and their classes, prepared once and cached as raw bytes.

Every picture is decoded, resized by the model's image processor, and checked once; training then reads bytes from a
memory-mapped file, so a bad picture cannot stop it midway. An image takes 3 x side^2 bytes in the cache: 50,000 of
224 x 224 take 7 GiB.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from finetune.data.cache import file_states, folder_for, prepare_once
from finetune.data.columns import Labels, listed, said_data
from finetune.data.image_decoding import CHANNELS, SHOWN, Resizer, moments, refuse_bad, square_processor
from finetune.data.image_samples import ImageCollator, Pictures, augmentation_of
from finetune.data.image_sources import BadImageError, RawImages, RawSplit, load_images
from finetune.data.splits import HeldOut, require_splits
from finetune.data.tables import SPLITS, hold_out, settle_splits
from finetune.errors import RequestError
from finetune.run.facts import LEAST_SIDE, MOST_SIDE
from finetune.run.flags.images import AugmentationArguments, ImageArguments
from finetune.run.flags.text import PreparationArguments
from finetune.run.launch import Launch

FORMAT = 4  # raise it when what is cached changes
LOOKED_AT = 200  # pictures from which the default side is chosen


@dataclass(frozen=True)
class ImageAccount:
    """What was found, for the log and the model card. `mean` and `std` (0 to 1) are those of the training pictures."""

    source: str
    is_builtin: bool
    rows: dict[str, int]
    skipped: dict[str, int]
    label_counts: dict[str, int]  # of the training pictures
    side: int
    sizes: list[str]  # the most frequent original sizes
    mean: list[float]
    std: list[float]
    notes: list[str]  # further remarks


@dataclass(frozen=True)
class ImageData:
    """The splits (`train`, `validation`, and `test` if given) with labels, account and processor. `names` identify the
    pictures, for predictions. `channels_last`: how batches lie in memory."""

    splits: dict[str, Pictures]
    labels: Labels
    account: ImageAccount
    processor: Any
    names: dict[str, list[str]]
    channels_last: bool = False

    @cached_property
    def collator(self) -> ImageCollator:
        """Normalizes like the processor."""
        kept = self.processor
        scale = kept.rescale_factor if kept.do_rescale else 1.0
        identity = [0.0] * CHANNELS, [1.0] * CHANNELS
        mean, std = (kept.image_mean, kept.image_std) if kept.do_normalize else identity
        return ImageCollator(scale, mean, std, self.channels_last)

    def require_all(self, training: Any) -> None:
        """Raises RequestError if the data lacks a split that a flag of `training` needs."""
        require_splits(self.splits, training, "dir")

    @property
    def lengths(self) -> None:
        """None: all pictures have the same size."""
        return None

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        account = self.account
        size = f"{account.side} x {account.side} pixels from {', '.join(account.sizes)}"
        what = f"pictures, {len(self.labels.names)} classes, {size}"
        return said_data(account, "", what, unit="pictures", flag="train_dir")


def prepare_images(
    arguments: ImageArguments,
    preparation: PreparationArguments,
    augmentation: AugmentationArguments,
    processor: Any | None,
    *,
    seed: int,
    launch: Launch,
    trained: Labels | None = None,
) -> ImageData:
    """The data of one run, from the cache or made by the rank that leads its node.

    `processor` is a trained model's; without it pictures are resized to squares and normalized by their own mean and
    standard deviation. `trained` holds a trained model's classes; its ids are kept if the data has the same classes.
    Raises RequestError for bad data, and RunError if the preparing rank takes longer than --data_timeout_seconds.
    """
    job = _Preparation(arguments, preparation, processor, seed, trained)
    folder, timeout = job.folder, preparation.data_timeout_seconds
    prepare_once(folder, job.make, what="to read pictures", launch=launch, timeout_seconds=timeout)
    stored = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    account = ImageAccount(**stored["account"])
    _check_crop(augmentation, stored["shape"][1:])
    own = processor or square_processor(account.side, account.mean, account.std)
    splits = {}
    for split, rows in account.rows.items():
        pixels = np.memmap(folder / f"{split}.bin", np.uint8, "r", shape=(rows, *stored["shape"]))
        labels = folder / f"{split}-labels.npy"
        change = augmentation_of(augmentation, account.side, account.is_builtin, seed) if split == "train" else None
        splits[split] = Pictures(pixels, np.load(labels) if labels.is_file() else None, change)
    return ImageData(splits, Labels("classification", tuple(stored["names"])), account, own, stored["pictures"])


def _check_crop(augmentation: AugmentationArguments, sides: Sequence[int]) -> None:
    """Checks the crop against the actual size, which --image_size, the model or the pictures determine."""
    if (most := augmentation.crop_padding) is not None and most >= min(sides):
        raise RequestError(
            f"--crop_padding is {most}, but pictures have {' x '.join(map(str, sides))} pixels here; a crop shifted by "
            f"that much may show none of them. Give less than {min(sides)}."
        )


@dataclass(frozen=True)
class _Preparation:
    """Everything that determines the prepared data, and how to make it."""

    arguments: ImageArguments
    preparation: PreparationArguments
    processor: Any | None
    seed: int
    trained: Labels | None

    @property
    def folder(self) -> Path:
        given = self.arguments
        names = (given.dataset_name, given.train_dir, given.validation_dir, given.test_dir, given.cifar_dir)
        more = [PIL.__version__, None if self.processor is None else self.processor.to_dict(), self.seed]
        return folder_for("images", FORMAT, [*map(file_states, names)], given, self.preparation, more, self.trained)

    def make(self, folder: Path) -> None:
        """Reads, checks, splits, decodes and saves."""
        arguments, preparation, seed = self.arguments, self.preparation, self.seed
        raw = load_images(arguments)
        names = _class_names(raw, self.trained)
        chosen, note = _chosen(raw, names, preparation, seed)
        first = "train" if "train" in chosen else next(iter(chosen))
        side = arguments.image_size or _default_side(raw.splits["train" if "train" in raw.splits else first])
        processor = self.processor or square_processor(side, [0.0] * CHANNELS, [1.0] * CHANNELS)
        resizer = Resizer(processor, preparation.preprocessing_num_workers or os.cpu_count() or 1)
        rows, bad, pictures, counts = {}, {}, {}, {}
        for split, source in chosen.items():
            kept, bad[split] = resizer.write(source, folder / f"{split}.bin")
            rows[split] = len(kept)
            pictures[split] = [source.names[row] for row in kept] if split == "test" else []
            if source.labels is not None:
                ids = np.asarray([names.index(source.labels[row]) for row in kept], dtype=np.int64)
                np.save(folder / f"{split}-labels.npy", ids)
                if split == "train":
                    found = Counter(ids.tolist())
                    counts = {name: found[i] for i, name in enumerate(names)}
        is_held_out = "validation" in chosen and "validation" not in raw.splits
        refuse_bad(
            bad, {split: len(source) for split, source in chosen.items()}, preparation.skip_bad_rows, is_held_out
        )
        found_labels = Counter(raw.splits["train"].labels or () if is_held_out else ())
        single = [name for name in names if found_labels[name] == 1]
        said_single = f"classes with a single picture, for training only: {listed(single, ', ')}" if single else ""
        mean, std = moments(np.memmap(folder / f"{first}.bin", np.uint8, "r").reshape(-1, *resizer.shape))
        account = ImageAccount(
            raw.source,
            raw.is_builtin,
            rows,
            {split: len(names) for split, names in bad.items()},
            counts,
            resizer.shape[-1],
            resizer.sizes(),
            mean,
            std,
            [one for one in (*raw.notes, said_single, note) if one],
        )
        stored = {"account": asdict(account), "names": names, "shape": resizer.shape, "pictures": pictures}
        (folder / "data.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")


def _class_names(raw: RawImages, trained: Labels | None) -> tuple[str, ...]:
    """The classes in the order of their ids. Raises RequestError for fewer than two or unknown classes."""
    known = trained.names if trained is not None else ()
    keeps_order = set(raw.names) == set(known) or "train" not in raw.splits
    names = known if known and keeps_order else raw.names
    if len(names) < 2:
        raise RequestError(
            f"the data has {len(names)} class(es){': ' + names[0] if names else ''}. Classification needs two: "
            "put the pictures of each class into a separate subfolder."
        )
    for split, source in raw.splits.items():
        unknown = Counter(label for label in source.labels or () if label not in set(names))
        if unknown:
            shown = ", ".join(f"{name!r} ({count} pictures)" for name, count in unknown.most_common(SHOWN))
            raise RequestError(
                f"the {split} data has classes that are not in the training data or the model: {shown}. "
                f"These are: {', '.join(names[:20])}. Use the same names."
            )
    return names


def _chosen(
    raw: RawImages, names: Sequence[str], cut: PreparationArguments, seed: int
) -> tuple[dict[str, RawSplit], str]:
    """The pictures of each split to use, with part of train held out if there is no validation split, and a note about
    that."""

    def held_out(train: RawSplit) -> HeldOut:
        ids = np.asarray([names.index(label) for label in train.labels or ()])
        return hold_out(ids, len(names), cut.validation_fraction, seed, "Add pictures, or give --validation_dir.")

    for split, source in raw.splits.items():
        if not len(source):
            raise RequestError(f"the {split} data has no pictures.")
    found, note = settle_splits(raw.splits, cut, seed, held_out, RawSplit.select)
    return {split: found[split] for split in SPLITS if split in found}, note


def _default_side(split: RawSplit) -> int:
    """The median of the shorter sides of some pictures, within the range that models are made for."""
    some = np.unique(np.linspace(0, len(split.names) - 1, LOOKED_AT).astype(int))
    sides = []
    for row in some:
        try:
            sides.append(min(split.read(int(row)).size))
        except BadImageError:
            continue  # reported when the picture is decoded
    return int(np.clip(int(np.median(sides)) if sides else MOST_SIDE, LEAST_SIDE, MOST_SIDE))
