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
import numpy.typing as npt
import PIL

from finetune.data.cache import OF_NO_EFFECT, cache_home, cache_key, file_states, prepare_once
from finetune.data.columns import Labels
from finetune.data.image_decoding import CHANNELS, SHOWN, Resizer, moments, refuse_bad, square_processor
from finetune.data.image_samples import ImageCollator, Pictures, augmentation_of
from finetune.data.image_sources import BadImageError, RawImages, RawSplit, load_images
from finetune.data.splits import require_splits, unused_fraction
from finetune.data.tables import SPLITS, at_most, hold_out
from finetune.errors import RequestError, plain
from finetune.run.facts import LEAST_SIDE, MOST_SIDE
from finetune.run.flags.images import AugmentationArguments, ImageArguments
from finetune.run.flags.text import PreparationArguments
from finetune.run.launch import Launch

FORMAT = 3  # raise it when what is cached changes
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
    left_out: int  # files that are not used
    hidden: list[str]  # picture folders that are skipped because their names begin with a dot
    single: list[str]  # classes of a single picture, none of which is held out
    mean: list[float]
    std: list[float]
    notes: list[str]  # further remarks


@dataclass(frozen=True)
class ImageData:
    """The splits (`train`, `validation`, and `test` if given) with labels, account and processor. `names` identify the
    pictures, for predictions."""

    splits: dict[str, Pictures]
    labels: Labels
    account: ImageAccount
    processor: Any
    names: dict[str, list[str]]

    @cached_property
    def collator(self) -> ImageCollator:
        """Normalizes like the processor."""
        kept = self.processor
        scale = kept.rescale_factor if kept.do_rescale else 1.0
        identity = [0.0] * CHANNELS, [1.0] * CHANNELS
        mean, std = (kept.image_mean, kept.image_std) if kept.do_normalize else identity
        return ImageCollator(scale, mean, std)

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
        rows = ", ".join(f"{count:,} {split}" for split, count in account.rows.items())
        resized = f", {account.side} x {account.side} pixels from {', '.join(account.sizes)}"
        bad = sum(account.skipped.values())
        cut = f", {bad:,} bad pictures left out" if bad else ""
        cut += f", {account.left_out:,} other files not used" if account.left_out else ""
        cut += f", hidden folders left out: {_listed(account.hidden)}" if account.hidden else ""
        cut += (
            f", classes with a single picture, for training only: {_listed(account.single)}" if account.single else ""
        )
        cut += "".join(f"; {note}" for note in account.notes)
        more = "; --train_dir takes your own" if account.is_builtin else ""
        return f"data: {account.source} ({rows} pictures, {len(self.labels.names)} classes{resized}{cut}{more})"


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
    folder = cache_home() / "images" / job.key()
    timeout = preparation.data_timeout_seconds
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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(plain(name) for name in [*names[:SHOWN], *(["..."] if len(names) > SHOWN else [])])


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

    def key(self) -> str:
        """The name of the cache folder: it changes with every flag, file and version that changes the data."""
        arguments = self.arguments
        folders = (arguments.train_dir, arguments.validation_dir, arguments.test_dir, arguments.cifar_dir)
        return cache_key(
            FORMAT,
            PIL.__version__,
            asdict(arguments),
            {name: value for name, value in asdict(self.preparation).items() if name not in OF_NO_EFFECT},
            [file_states(folder) for folder in (arguments.dataset_name, *folders)],
            None if self.processor is None else self.processor.to_dict(),
            self.seed,
            None if self.trained is None else asdict(self.trained),
        )

    def make(self, folder: Path) -> None:
        """Reads, checks, splits, decodes and saves."""
        arguments, preparation, seed = self.arguments, self.preparation, self.seed
        raw = load_images(arguments)
        names = _class_names(raw, self.trained)
        chosen, note = _chosen_rows(raw, names, preparation, seed)
        first = "train" if "train" in chosen else next(iter(chosen))
        side = arguments.image_size or _default_side(raw.splits["train" if "train" in raw.splits else first])
        processor = self.processor or square_processor(side, [0.0] * CHANNELS, [1.0] * CHANNELS)
        resizer = Resizer(processor, preparation.preprocessing_num_workers or os.cpu_count() or 1)
        rows, bad, pictures, counts = {}, {}, {}, {}
        for split, (source, wanted) in chosen.items():
            kept, bad[split] = resizer.write(source, wanted, folder / f"{split}.bin")
            rows[split] = len(kept)
            pictures[split] = [source.names[row] for row in kept] if split == "test" else []
            if source.labels is not None:
                ids = np.asarray([names.index(source.labels[row]) for row in kept], dtype=np.int64)
                np.save(folder / f"{split}-labels.npy", ids)
                if split == "train":
                    found = Counter(ids.tolist())
                    counts = {name: found[i] for i, name in enumerate(names)}
        is_held_out = "validation" in chosen and "validation" not in raw.splits
        wanted_rows = {split: len(wanted) for split, (_, wanted) in chosen.items()}
        refuse_bad(bad, wanted_rows, preparation.skip_bad_rows, is_held_out)
        found_labels = Counter(raw.splits["train"].labels or () if is_held_out else ())
        mean, std = moments(np.memmap(folder / f"{first}.bin", np.uint8, "r").reshape(-1, *resizer.shape))
        account = ImageAccount(
            raw.source,
            raw.is_builtin,
            rows,
            {split: len(names) for split, names in bad.items()},
            counts,
            resizer.shape[-1],
            resizer.sizes(),
            raw.left_out,
            list(raw.hidden),
            [name for name in names if found_labels[name] == 1],
            mean,
            std,
            [one for one in (raw.columns, note) if one],
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


def _chosen_rows(
    raw: RawImages, names: Sequence[str], cut: PreparationArguments, seed: int
) -> tuple[dict[str, tuple[RawSplit, npt.NDArray[np.int64]]], str]:
    """The rows of each split to use, with part of train held out if there is no validation split, and a note about
    that."""
    note = ""
    found = {split: (source, np.arange(len(source.names))) for split, source in raw.splits.items()}
    for split, source in raw.splits.items():
        if not source.names:
            raise RequestError(f"the {split} data has no pictures.")
    if "train" in found and "validation" not in found:
        source = raw.splits["train"]
        ids = np.asarray([names.index(label) for label in source.labels or ()])
        mend = "Add pictures, or give --validation_dir."
        kept, held_out, note = hold_out(ids, len(names), cut.validation_fraction, seed, mend)
        found |= {"train": (source, kept), "validation": (source, held_out)}
    elif "train" in found:
        note = unused_fraction(cut)
    limits = dict(zip(SPLITS, (cut.max_train_samples, cut.max_eval_samples, cut.max_predict_samples), strict=True))
    for split, (source, rows) in found.items():
        if (most := limits[split]) is not None:
            found[split] = source, rows[at_most(len(rows), most, None if split == "test" else seed)]
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
