"""Pictures to bytes of one size: decoded on several threads, checked, and resized as the model's processor does it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import ViTImageProcessorPil

from finetune.data.image_sources import BadImageError, RawSplit
from finetune.errors import RequestError, RunError, first_line

CHANNELS = 3  # transformers' pipelines turn every picture into RGB (image_utils.py, load_image), grey ones too
CHUNK = 512  # pictures in memory at a time
SHOWN = 5


def square_processor(side: int, mean: Sequence[float], std: Sequence[float]) -> Any:
    """An image processor that makes squares of `side` pixels, whatever the shape was."""
    # transformers 5.23 has two backends for each processor, and this one does without torchvision. What it saves opens
    # by either.
    size = {"height": side, "width": side}
    return ViTImageProcessorPil(size=size, image_mean=list(mean), image_std=list(std))


def refuse_bad(bad: Mapping[str, Sequence[str]], of: Mapping[str, int], skip: bool, is_held_out: bool) -> None:
    """Raises RequestError for pictures that cannot be read, all at once, unless the rest is to do without them. Both
    mappings are by split; `is_held_out`: what validates is a part of the user's train data."""
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
        raise RequestError(f"{found}. Fix them, or leave them out by --skip_bad_rows True.")
    for split, names in bad.items():
        if len(names) == of[split]:
            raise RequestError(f"the {split} data has no picture that can be read, {names[0]} for instance.")


class Resizer:
    """Decodes pictures on several threads (Pillow lets go of Python's lock) and writes them one after another."""

    def __init__(self, processor: Any, threads: int) -> None:
        self.processor, self.threads = processor, threads
        self.shape: tuple[int, ...] = ()
        self.seen: Counter[tuple[int, int]] = Counter()

    def sizes(self) -> list[str]:
        """The most frequent sizes that pictures came in."""
        shown = [f"{width} x {height}" for (width, height), _ in self.seen.most_common(3)]
        return [*shown, f"{len(self.seen) - 3} other sizes"] if len(self.seen) > 3 else shown

    def write(self, source: RawSplit, rows: npt.NDArray[np.int64], path: Path) -> tuple[list[int], list[str]]:
        """Which rows were written, and of the others their name and what is wrong."""
        kept: list[int] = []
        bad: list[str] = []
        with path.open("wb") as file:
            for row, (pixels, reason) in zip(rows.tolist(), self._read_all(source, rows), strict=True):
                if pixels is None:
                    bad.append(f"{source.names[row]} {reason}")
                    continue
                if not self.shape:
                    self.shape = pixels.shape
                    _check_room(path.parent, pixels.nbytes * len(rows))
                if pixels.shape != self.shape:
                    raise RequestError(
                        f"{source.names[row]} becomes {pixels.shape}, others {self.shape}: the model's image processor "
                        "gives pictures of different sizes. Set do_center_crop, or a height and width, in its "
                        "preprocessor_config.json."
                    )
                file.write(pixels.tobytes())
                kept.append(row)
        return kept, bad

    def _read_all(self, source: RawSplit, rows: npt.NDArray[np.int64]) -> Iterator[tuple[Any, str]]:
        with ThreadPoolExecutor(self.threads) as pool:
            for start in range(0, len(rows), CHUNK):
                for pixels, reason, size in pool.map(lambda row: self._read(source, row), rows[start : start + CHUNK]):
                    self.seen.update([size] if size else [])
                    yield pixels, reason

    def _read(self, source: RawSplit, row: Any) -> tuple[Any, str, tuple[int, int] | None]:
        """Bytes (channels, H, W), or None and what is wrong; and the size that the picture came in."""
        try:
            picture = source.read(int(row))
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
        """The size that the processor would leave as it is, to save its time; None where it may do more."""
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
    sums, squares = np.zeros(pixels.shape[1]), np.zeros(pixels.shape[1])
    for start in range(0, len(pixels), CHUNK):
        some = pixels[start : start + CHUNK] / 255.0
        sums, squares = sums + some.sum(axis=(0, 2, 3)), squares + (some**2).sum(axis=(0, 2, 3))
    count = pixels.size / pixels.shape[1]
    mean = sums / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 1e-8))  # of pictures of one colour, too
    return [round(float(value), 6) for value in mean], [round(float(value), 6) for value in std]
