"""Image classification: pictures of one size and their classes, prepared once and cached as plain bytes.

Every picture is decoded, resized as the model's image processor does it, and checked once; training then reads bytes
from a memory-mapped file, and no picture can stop it in the middle. An image takes 3 x side^2 bytes on the disk of the
cache: 50,000 of 224 x 224 are 7 GiB.
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
LOOKED_AT = 200  # pictures that the default side is taken from


@dataclass(frozen=True)
class ImageAccount:
    """What was found, for the log and the model card. `mean` and `std` are those of the training pictures, 0 to 1."""

    source: str
    is_builtin: bool
    rows: dict[str, int]
    skipped: dict[str, int]
    label_counts: dict[str, int]  # of the training pictures
    side: int
    sizes: list[str]  # the most frequent sizes that pictures came in
    left_out: int  # files that were not looked at
    hidden: list[str]  # folders of pictures that were not looked at, for their names begin with a dot
    single: list[str]  # classes of one picture, of which nothing was held out
    mean: list[float]
    std: list[float]
    notes: list[str]  # what else there is to say


@dataclass(frozen=True)
class ImageData:
    """The splits (`train`, `validation`, and `test` where given) with all that belongs to them. `names` say which
    picture is which, for predictions."""

    splits: dict[str, Pictures]
    labels: Labels
    account: ImageAccount
    processor: Any
    names: dict[str, list[str]]

    @cached_property
    def collator(self) -> ImageCollator:
        """Normalises as the processor does."""
        kept = self.processor
        scale = kept.rescale_factor if kept.do_rescale else 1.0
        identity = [0.0] * CHANNELS, [1.0] * CHANNELS
        mean, std = (kept.image_mean, kept.image_std) if kept.do_normalize else identity
        return ImageCollator(scale, mean, std)

    def require_all(self, training: Any) -> None:
        """Raises RequestError where the data lacks a split that a flag of `training` asks for."""
        require_splits(self.splits, training, "dir")

    @property
    def lengths(self) -> None:
        """Pictures have one size."""
        return None

    def describe(self) -> str:
        """One line for the log: what is used, and which flags change it."""
        account = self.account
        rows = ", ".join(f"{count:,} {split}" for split, count in account.rows.items())
        resized = f", {account.side} x {account.side} pixels from {', '.join(account.sizes)}"
        bad = sum(account.skipped.values())
        cut = f", {bad:,} bad pictures left out" if bad else ""
        cut += f", {account.left_out:,} other files not looked at" if account.left_out else ""
        cut += f", hidden by a dot and left out: {_listed(account.hidden)}" if account.hidden else ""
        cut += f", of one picture and only trained on: {_listed(account.single)}" if account.single else ""
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
    """The data of one run, from the cache or made on the rank that leads its node.

    `processor` is a trained model's; without it pictures become squares, and are normalised by their own mean and
    spread. `trained` are the classes of a trained model, whose order of ids is kept where the data has the same.
    Raises RequestError for bad data and RunError when the rank that prepares takes longer than
    --data_timeout_seconds.
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
    """Of the settled sides, which --image_size, the model or the pictures decide."""
    if (most := augmentation.crop_padding) is not None and most >= min(sides):
        raise RequestError(
            f"--crop_padding is {most}, but pictures have {' x '.join(map(str, sides))} pixels here, and a crop that "
            f"moves so far may show none of them. Give less than {min(sides)}."
        )


@dataclass(frozen=True)
class _Preparation:
    """All that decides what the prepared data looks like, and how it is made."""

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
        """Read, check, split, decode and save."""
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
    """The classes in the order of their ids. Raises RequestError where nothing can be told apart."""
    known = trained.names if trained is not None else ()
    keeps_order = set(raw.names) == set(known) or "train" not in raw.splits
    names = known if known and keeps_order else raw.names
    if len(names) < 2:
        raise RequestError(
            f"the data has {len(names)} class(es){': ' + names[0] if names else ''}. To tell pictures apart takes two: "
            "put those of each class into a sub-folder of its own."
        )
    for split, source in raw.splits.items():
        unknown = Counter(label for label in source.labels or () if label not in set(names))
        if unknown:
            shown = ", ".join(f"{name!r} ({count} pictures)" for name, count in unknown.most_common(SHOWN))
            raise RequestError(
                f"the {split} data has classes that are not in the training data or the model: {shown}. "
                f"These are: {', '.join(names[:20])}. Name them alike."
            )
    return names


def _chosen_rows(
    raw: RawImages, names: Sequence[str], cut: PreparationArguments, seed: int
) -> tuple[dict[str, tuple[RawSplit, npt.NDArray[np.int64]]], str]:
    """Of each split which pictures are used, with a part of train held out where there is no validation split; and what
    there is to say of that."""
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
    """The middle one of the shorter sides of some pictures, within what models are made for."""
    some = np.unique(np.linspace(0, len(split.names) - 1, LOOKED_AT).astype(int))
    sides = []
    for row in some:
        try:
            sides.append(min(split.read(int(row)).size))
        except BadImageError:
            continue  # which is told of when it is its turn
    return int(np.clip(int(np.median(sides)) if sides else MOST_SIDE, LEAST_SIDE, MOST_SIDE))
