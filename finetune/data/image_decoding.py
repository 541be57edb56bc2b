"""Decodes pictures in several threads, checks them, and resizes them with the model's processor to one size."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import ViTImageProcessorPil

from finetune.data.image_sources import BadImageError, RawSplit
from finetune.data.splits import mend_of_bad
from finetune.errors import RequestError, RunError, first_line

CHANNELS = 3  # like transformers' pipelines, all pictures become RGB (image_utils.py, load_image)
CHUNK = 512  # pictures in memory at a time
COUNTED = 32  # the same; counting takes eight bytes for each byte
SHOWN = 5


def square_processor(side: int, mean: Sequence[float], std: Sequence[float]) -> Any:
    """An image processor that resizes any picture to a square of `side` pixels."""
    # transformers 5.23 has two backends per processor; this one needs no torchvision. Both open what either saves.
    size = {"height": side, "width": side}
    return ViTImageProcessorPil(size=size, image_mean=list(mean), image_std=list(std))


def refuse_bad(bad: Mapping[str, Sequence[str]], of: Mapping[str, int], skip: bool, is_held_out: bool) -> None:
    """Raises one RequestError for all unreadable pictures, unless `skip` and some can be read. Both mappings are by
    split; `is_held_out`: the validation split was held out from the user's training data."""
    if any(bad.values()) and not skip:
        wrong, all_of = {split: list(names) for split, names in bad.items()}, dict(of)
        if is_held_out:
            wrong["train"] = sorted([*wrong["train"], *wrong.pop("validation")])
            all_of["train"] += all_of["validation"]
        found = ". And ".join(
            f"the {split} data has {len(names):,} of {all_of[split]:,} pictures that cannot be read: "
            + "; ".join([*names[:SHOWN], *(["..."] if len(names) > SHOWN else [])])
            for split, names in wrong.items()
            if names
        )
        worst = max(filter(wrong.get, wrong), key=lambda split: len(wrong[split]) / all_of[split])
        raise RequestError(f"{found}. {mend_of_bad(len(wrong[worst]), all_of[worst])}")
    for split, names in bad.items():
        if len(names) == of[split]:
            raise RequestError(f"the {split} data has no picture that can be read, {names[0]} for instance.")


class Resizer:
    """Decodes pictures in several threads (Pillow releases the GIL) and writes them one after another."""

    def __init__(self, processor: Any, threads: int) -> None:
        self.processor, self.threads = processor, threads
        self.shape: tuple[int, ...] = ()
        self.seen: Counter[tuple[int, int]] = Counter()

    def sizes(self) -> list[str]:
        """The most frequent original sizes."""
        shown = [f"{width} x {height}" for (width, height), _ in self.seen.most_common(3)]
        return [*shown, f"{len(self.seen) - 3} other sizes"] if len(self.seen) > 3 else shown

    def write(self, source: RawSplit, path: Path) -> tuple[list[int], list[str]]:
        """Returns the rows written, and for each other row its name and the error."""
        kept: list[int] = []
        bad: list[str] = []
        with path.open("wb") as file:
            for row, (pixels, reason) in enumerate(self._read_all(source)):
                if pixels is None:
                    bad.append(f"{source.names[row]} {reason}")
                    continue
                if not self.shape:
                    self.shape = pixels.shape
                    _check_room(path.parent, pixels.nbytes * len(source))
                if pixels.shape != self.shape:
                    raise RequestError(
                        f"{source.names[row]} becomes {pixels.shape}, others {self.shape}: the model's image processor "
                        "gives pictures of different sizes. Set do_center_crop, or a height and width, in its "
                        "preprocessor_config.json."
                    )
                file.write(pixels.tobytes())
                kept.append(row)
        return kept, bad

    def _read_all(self, source: RawSplit) -> Iterator[tuple[Any, str]]:
        with ThreadPoolExecutor(self.threads) as pool:
            for start in range(0, len(source), CHUNK):
                rows = range(start, min(start + CHUNK, len(source)))
                for pixels, reason, size in pool.map(partial(self._read, source), rows):
                    self.seen.update([size] if size else [])
                    yield pixels, reason

    def _read(self, source: RawSplit, row: int) -> tuple[Any, str, tuple[int, int] | None]:
        """Pixels (channels, H, W) or None, the error, and the picture's original size."""
        try:
            picture = source.read(row)
        except BadImageError as error:
            return None, str(error), None
        if picture.size == self._square:
            return np.asarray(picture).transpose(2, 0, 1), "", picture.size
        try:
            made = self.processor(picture, do_rescale=False, do_normalize=False, return_tensors="np")
            found = made["pixel_values"][0]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RequestError(
                f"{source.names[row]}: the model's image processor fails ({first_line(error)}). Correct the model's "
                "preprocessor_config.json."
            ) from error
        return np.asarray(found).astype(np.uint8), "", picture.size

    @cached_property
    def _square(self) -> tuple[int, int] | None:
        """The size at which the processor changes nothing, so that it can be skipped; None if it may do more."""
        kind, size = type(self.processor), self.processor.size
        return (size["width"], size["height"]) if kind is ViTImageProcessorPil and "width" in size else None


def _check_room(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise RunError(
            f"the pictures take {needed_bytes / 2**30:.1f} GiB, and {folder.parent} ($FINETUNE_CACHE) has "
            f"{free / 2**30:.1f} GiB free. Make room, set it to a larger disk, or lower --image_size."
        )


def moments(pixels: npt.NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, from 0 to 1, over (N, channels, H, W)."""
    channels = pixels.shape[1]
    counts = np.zeros((channels, 256))  # of each value
    for start in range(0, len(pixels), COUNTED):
        some = pixels[start : start + COUNTED]
        counts += [np.bincount(some[:, channel].ravel(), minlength=256) for channel in range(channels)]
    values, shares = np.arange(256) / 255, counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ values
    std = np.sqrt(np.maximum(shares @ values**2 - mean**2, 1e-8))  # not 0 even for pictures of one color
    return [round(float(value), 6) for value in mean], [round(float(value), 6) for value in std]
