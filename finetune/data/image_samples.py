"""Prepared pictures as samples: memory-mapped bytes, augmented in training, and normalized batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from finetune.run.flags.images import AugmentationArguments

CROP_SHARE = 8  # crops shift by 1/8 of a side: 4 of 32 pixels for CIFAR (arXiv 1512.03385, section 4.2)


@dataclass(frozen=True)
class Augmentation:
    """A random crop of the same size, shifted by up to `crop_padding` pixels over black, and an optional flip."""

    crop_padding: int
    horizontal_flip: bool
    seed: int

    def __call__(self, picture: npt.NDArray[np.uint8], epoch: int, index: int) -> npt.NDArray[np.uint8]:
        """Augments `picture` (channels, H, W) with its own seed: the result is the same on any rank, in any order."""
        random = np.random.default_rng((self.seed, epoch, index))
        if most := self.crop_padding:
            height, width = picture.shape[1:]
            top, left = most - random.integers(-most, most + 1, size=2)  # of the crop in the padded picture
            black = np.zeros((len(picture), height + 2 * most, width + 2 * most), dtype=picture.dtype)
            black[:, most : most + height, most : most + width] = picture
            picture = black[:, top : top + height, left : left + width]
        if self.horizontal_flip and random.random() < 0.5:
            picture = picture[:, :, ::-1]
        return picture


def augmentation_of(arguments: AugmentationArguments, side: int, is_builtin: bool, seed: int) -> Augmentation | None:
    """The augmentation that the flags ask for; None for no augmentation."""
    default = 0 if is_builtin else side // CROP_SHARE
    padding = default if arguments.crop_padding is None else arguments.crop_padding
    flip = not is_builtin if arguments.horizontal_flip is None else arguments.horizontal_flip
    return Augmentation(padding, flip, seed) if padding or flip else None


class Pictures(Dataset):
    """`pixels` (N, channels, H, W) in bytes, and class ids, or None if unlabeled."""

    def __init__(
        self,
        pixels: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64] | None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.pixels, self.labels, self.augmentation = pixels, labels, augmentation
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()  # shared memory: DataLoader workers see it, too

    def begin_epoch(self, epoch: int) -> None:
        """Sets the epoch; each epoch augments differently."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture = np.asarray(self.pixels[index])
        if self.augmentation is not None:
            picture = self.augmentation(picture, int(self._epoch), index)
        sample: dict[str, Any] = {"pixel_values": torch.from_numpy(np.array(picture))}
        if self.labels is not None:
            sample["labels"] = int(self.labels[index])
        return sample


class ImageCollator:
    """A model's input batch: (bytes x `scale` - mean) / std for each channel, in fp32. With `channels_last` the numbers
    of a pixel lie side by side in memory."""

    def __init__(self, scale: float, mean: Sequence[float], std: Sequence[float], channels_last: bool = False) -> None:
        self.scale = scale
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.mean, self.std = (torch.tensor(list(values)).reshape(1, -1, 1, 1) for values in (mean, std))

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = torch.stack([sample["pixel_values"] for sample in samples])  # (B, channels, H, W)
        pixels = pixels.contiguous(memory_format=self.layout).float()  # what follows keeps the layout
        batch = {"pixel_values": (pixels * self.scale - self.mean) / self.std}
        if "labels" in samples[0]:
            batch["labels"] = torch.tensor([sample["labels"] for sample in samples])
        return batch
