"""Which pictures are classified, by which model: the flags of recipes/image_cls.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.run.flag import FOLDER, NAME_OR_PATH
from finetune.run.range import AT_LEAST_ONE, NOT_NEGATIVE, RATE
from finetune.run.sizes import IMAGE_SIZES


@dataclass
class ImageModelArguments:
    """Which model. Without a name, one of `model_type` and `model_size` is trained from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "hub id or folder of any image classifier", "path": NAME_OR_PATH}
    )
    model_revision: str = field(default="main", metadata={"help": "branch, tag or commit on the hub"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run Python code that comes with the model"})
    model_type: str = field(
        default="resnet", metadata={"help": "from scratch: resnet or alexnet", "choices": tuple(IMAGE_SIZES)}
    )
    model_size: str = field(
        default="tiny",
        metadata={"help": "; ".join(f"{kind}: {', '.join(sizes)}" for kind, sizes in IMAGE_SIZES.items())},
    )
    norm: str = field(
        default="batch", metadata={"help": "from scratch, of a resnet: batch or group", "choices": ("batch", "group")}
    )
    dropout: float | None = field(
        default=None, metadata={"help": "from scratch, of an alexnet; default 0.5", "range": RATE}
    )
    sync_batch_norm: bool = field(default=False, metadata={"help": "batch norm over the pictures of all ranks"})
    freeze_batch_norm: bool = field(
        default=False, metadata={"help": "keep a pretrained model's statistics of batch norm"}
    )


@dataclass
class ImageArguments:
    """What to train on. With none of these, scikit-learn's handwritten digits are used."""

    train_dir: str | None = field(
        default=None, metadata={"help": "folder with a sub-folder of pictures for each class", "path": FOLDER}
    )
    validation_dir: str | None = field(
        default=None, metadata={"help": "likewise; default: a part of train", "path": FOLDER}
    )
    test_dir: str | None = field(
        default=None, metadata={"help": "likewise, or pictures without classes", "path": FOLDER}
    )
    cifar_dir: str | None = field(
        default=None, metadata={"help": "cifar-10-batches-py or cifar-10-batches-bin", "path": FOLDER}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "hub data set, or a local folder in its layout", "path": NAME_OR_PATH}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "configuration of the hub data set"})
    image_column_name: str | None = field(default=None, metadata={"help": "hub data; default: found by its type"})
    label_column_name: str | None = field(default=None, metadata={"help": "likewise"})
    image_size: int | None = field(
        default=None,
        metadata={
            "help": "side in pixels that pictures get; default: the model's, or by the data",
            "range": AT_LEAST_ONE,
        },
    )


@dataclass
class AugmentationArguments:
    """How training pictures are changed, anew in each epoch. The built-in digits are left as they are by default."""

    crop_padding: int | None = field(
        default=None,
        metadata={
            "help": "pixels that a random crop moves by at most; default: an eighth of the side",
            "range": NOT_NEGATIVE,
        },
    )
    horizontal_flip: bool | None = field(default=None, metadata={"help": "mirror every other picture; default: True"})
