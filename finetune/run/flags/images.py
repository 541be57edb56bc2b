"""The flags of recipes/image_cls.py: model and images."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.run.flag import AT_LEAST_ONE, FOLDER, NAME_OR_PATH, NOT_NEGATIVE, RATE, flag
from finetune.run.on_resume import EVALUATED, GOES_ON, MODEL, ROWS, VALUES
from finetune.run.sizes import IMAGE_SIZES


@dataclass
class ImageModelArguments:
    """Which model. Without a name, one of `model_type` and `model_size` is trained from scratch."""

    model_name_or_path: str | None = flag(None, "hub id or folder of any image classifier", MODEL, path=NAME_OR_PATH)
    model_revision: str = flag("main", "branch, tag or commit on the hub", MODEL)
    trust_remote_code: bool = flag(False, "run Python code that comes with the model", GOES_ON)
    model_type: str = flag(
        "resnet", "model to train from scratch: resnet or alexnet", MODEL, choices=tuple(IMAGE_SIZES)
    )
    model_size: str = flag(
        "tiny", "; ".join(f"{kind}: {', '.join(sizes)}" for kind, sizes in IMAGE_SIZES.items()), MODEL
    )
    norm: str = flag(
        "batch", "normalization of a resnet from scratch: batch or group", MODEL, choices=("batch", "group")
    )
    dropout: float | None = flag(None, "dropout of an alexnet from scratch; default: 0.5", MODEL, range=RATE)
    sync_batch_norm: bool = flag(False, "compute batch norm over the images of all ranks", VALUES)
    freeze_batch_norm: bool = flag(False, "keep the pretrained batch-norm statistics", VALUES)


@dataclass
class ImageArguments:
    """What to train on. Without these, scikit-learn's handwritten digits are used."""

    train_dir: str | None = flag(None, "folder with one subfolder of images for each class", ROWS, path=FOLDER)
    validation_dir: str | None = flag(
        None, "held-out images, in the same layout; default: a part of the training images", EVALUATED, path=FOLDER
    )
    test_dir: str | None = flag(None, "images to predict, in the same layout or without classes", GOES_ON, path=FOLDER)
    cifar_dir: str | None = flag(
        None, "CIFAR-10 as downloaded: cifar-10-batches-py or cifar-10-batches-bin", ROWS, path=FOLDER
    )
    dataset_name: str | None = flag(
        None, "data set on the hub, or a local folder in its layout", ROWS, path=NAME_OR_PATH
    )
    dataset_config_name: str | None = flag(None, "configuration of the hub data set", ROWS)
    image_column_name: str | None = flag(
        None, "column of the images in a hub data set; default: found by its type", ROWS
    )
    label_column_name: str | None = flag(
        None, "column of the labels in a hub data set; default: found by its type", ROWS
    )
    image_size: int | None = flag(
        None, "side in pixels to resize images to; default: the model's, or by the data", ROWS, range=AT_LEAST_ONE
    )


@dataclass
class AugmentationArguments:
    """How training images are augmented in each epoch. By default, the built-in digits are not."""

    crop_padding: int | None = flag(
        None, "random crop: largest shift in pixels; default: an eighth of the side", VALUES, range=NOT_NEGATIVE
    )
    horizontal_flip: bool | None = flag(None, "mirror half of the images at random; default: True", VALUES)
